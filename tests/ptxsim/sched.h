// What sched.c, launch.c, control.c, warp.c and special.c know of each other: clusters as something that runs in
// slices, the state that the scheduler keeps for a warp, and the barriers.
#ifndef PTXSIM_SCHED_H
#define PTXSIM_SCHED_H

#include "sim.h"

enum { SIMULATED_SMS = 132, NAMED_BARRIERS = 16 };

// One call of a function by one lane.
typedef struct call_frame {
    struct call_frame *caller;
    const kernel *from; // the calling function
    const inst *call;
    size_t base; // of the callee's local memory
    const kernel *function;
} call_frame;

enum { NOT_WAITING = 0, WAITING = 1, RELEASED = 2 };
typedef struct sched_state {
    uint32_t blocked;      // lanes whose instruction answered BLOCKED, and nothing has changed since
    uint64_t blocked_step; // the cluster's step then
    int rotate_after;      // pc of the group whose quantum ran out: the next group goes first; -1: the lowest pc does
    uint64_t frozen_until; // random schedule: not chosen before the cluster's turn reaches this
    // bar.warp.sync
    uint8_t warp_barrier[LANES]; // NOT_WAITING ...
    uint32_t warp_barrier_mask[LANES];
    // bar.sync, bar.red, barrier.cluster.wait
    uint8_t barrier_state[LANES];
    uint8_t barrier_id[LANES];
    uint8_t barrier_result[LANES];        // the predicate of bar.red
    uint32_t barrier_popcount;            // bar.red.popc: the same for all
    uint64_t cluster_arrivals[LANES];     // barrier.cluster phases that the lane has arrived at
    uint64_t cluster_waits[LANES];        // and waited for
    const inst *cluster_arrive_at[LANES]; // its last arrive
    uint32_t carry, carry_poisoned;       // CC.CF by lane
    // setmaxnreg
    int setmaxnreg_count;
    uint64_t setmaxnreg_hash;
    const inst *setmaxnreg_at;
} sched_state;

typedef enum { SLICE_DONE, SLICE_FAILED, SLICE_PAUSED, SLICE_WAITS } slice;

// Makes a cluster ready to run. first_ctaid: of its CTA 0. NULL without memory.
cluster *cluster_new(grid *g, int id, const int first_ctaid[3]);
// Runs until it ends, waits for an earlier grid, or has executed about so many warp-instructions.
slice cluster_run(cluster *c, uint64_t budget);
void cluster_free(cluster *c);
uint64_t cluster_instructions(const cluster *c);
uint64_t cluster_quiet(const cluster *c); // instructions since anything has changed that others could wait for
void report_livelock(cluster *c, uint64_t instructions);
// The cluster's next slice ends when every CTA has called launch_dependents or exited.
void cluster_pause_on_trigger(cluster *c);
bool cluster_triggered(const cluster *c);
void cta_triggered(cta *c);
uint64_t simulated_clock(const warp *w);
bool lanes_exited(warp *w, const inst *in, uint32_t mask); // false: a finding
void wake_warp(warp *w);                                   // something that its blocked lanes wait for has changed

// control.c
outcome exec_bra(warp *w, const inst *in, uint32_t mask);
void control_cta_start(cta *c);
void control_cta_end(cta *c);
void control_cluster_start(cluster *c);
void control_cluster_end(cluster *c);
void control_lanes_exited(warp *w, uint32_t mask);
void control_cta_exit(cta *c);
void barriers_print(const cluster *c, FILE *to);
void free_frames(warp *w);
bool waits_for_grid(const warp *w); // a lane stands at griddepcontrol.wait
// warp.c: lanes of mask that may run this .sync instruction now; the others wait for members. *failed: a finding.
uint32_t members_ready(warp *w, const inst *in, uint32_t mask, bool *failed);

// report.c
struct report_buffer *report_buffer_new(void);
void report_buffer_free(struct report_buffer *r);
bool report_is_fatal(const struct report_buffer *r); // the cluster's run ends
// Adds a cluster's findings, counts and executed instructions to a report.
ptxsim_report *report_new(int warps);
void report_add(ptxsim_report *r, const struct report_buffer *b);
void report_add_executed(ptxsim_report *r, const cluster *c);
void report_launch_refused(ptxsim_report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
void report_finish(ptxsim_report *r, bool finished);

// launch.c
bool launch_earlier_grids_done(const grid *g);

#endif
