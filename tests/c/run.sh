#!/bin/sh
# Builds the C tests, with every warning an error, and runs them: natively, under the address and undefined-behaviour
# sanitizers, under the thread sanitizer, and for aarch64 under qemu-user where a cross compiler and qemu are installed.
#
#     tests/c/run.sh [native] [address] [thread] [aarch64]        all four unless named
#
# CC, AARCH64_CC and QEMU_AARCH64 name other tools; BUILD, another folder than build/c-tests.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build/c-tests}
CC=${CC:-cc}
AARCH64_CC=${AARCH64_CC:-aarch64-linux-gnu-gcc}
QEMU_AARCH64=${QEMU_AARCH64:-qemu-aarch64}
warnings="-std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Wpedantic -Werror"

# compile NAME COMPILER HOST FLAGS: $build/NAME/test_cpu, test_bwd and test_plan, with the variants that HOST has.
compile() {
    name=$1 compiler=$2 host=$3 flags=$4
    out=$build/$name
    rm -rf "$out"
    mkdir -p "$out"
    sed -n 's/^FA4_CPU_ISA(\([a-z0-9_]*\), \([a-z0-9_]*\), "\(.*\)")$/\1 \2 \3/p' "$root/csrc/variants.def" |
        while read -r isa isa_host isa_flags; do
            [ "$isa_host" = any ] || [ "$isa_host" = "$host" ] || continue
            for kernel in $(sed -n 's/^FA4_CPU_KERNEL(\([a-z0-9_]*\))$/\1/p' "$root/csrc/variants.def"); do
                echo "$kernel.c $isa_flags -DFA4_CPU_ISA_NAME=$isa -o $out/${kernel}_$isa.o"
            done
        done >"$out/kernels"
    [ -s "$out/kernels" ] || { echo "no kernel in csrc/variants.def"; exit 1; }
    xargs -P "${MAX_JOBS:-2}" -I{} sh -ec "$compiler $warnings $flags -c '$root/csrc/cpu/'{}" <"$out/kernels"
    for test in test_cpu test_bwd; do
        # shellcheck disable=SC2086
        $compiler $warnings $flags "$root/csrc/dispatch.c" "$root/csrc/cpu/cpuid.c" "$root/tests/c/$test.c" "$out"/*.o \
            -o "$out/$test" -lm -pthread
    done
    # Plans need no kernel.
    # shellcheck disable=SC2086
    $compiler $warnings $flags -DFA4_CUDA -include "$root/csrc/verify/no_cpu.h" "$root/csrc/dispatch.c" \
        "$root/csrc/cpu/cpuid.c" "$root"/csrc/cuda/maps.c "$root"/csrc/cuda/tiles.c "$root"/csrc/*/plan.c \
        "$root/tests/c/test_plan.c" -o "$out/test_plan" -lm -pthread
}

for what in ${*:-native address thread aarch64}; do
    echo "== $what"
    host=$(uname -m)
    case $what in
    native)
        compile native "$CC" "$host" "-O3"
        "$build/native/test_cpu" 200
        "$build/native/test_bwd"
        "$build/native/test_plan" 20000
        ;;
    address)
        compile address "$CC" "$host" "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
        "$build/address/test_cpu" 60
        "$build/address/test_bwd"
        "$build/address/test_plan" 5000
        ;;
    thread)
        compile thread "$CC" "$host" "-O1 -g -fsanitize=thread"
        "$build/thread/test_cpu" 40
        "$build/thread/test_bwd"
        ;;
    aarch64)
        if ! command -v "$AARCH64_CC" >/dev/null || ! command -v "$QEMU_AARCH64" >/dev/null; then
            echo "skipped: needs $AARCH64_CC and $QEMU_AARCH64 (Debian: gcc-aarch64-linux-gnu, qemu-user)"
            continue
        fi
        compile aarch64 "$AARCH64_CC" aarch64 "-O3 -static"
        "$QEMU_AARCH64" "$build/aarch64/test_cpu" 60
        "$QEMU_AARCH64" "$build/aarch64/test_bwd"
        "$QEMU_AARCH64" "$build/aarch64/test_plan" 2000
        ;;
    *)
        echo "unknown: $what (native, address, thread or aarch64)"
        exit 1
        ;;
    esac
done
