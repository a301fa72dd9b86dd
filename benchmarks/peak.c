// The machine's own ceiling: independent multiply-adds in registers, on the calling thread.
#include <stdint.h>

#if defined(__AVX512F__)
#    include <immintrin.h>
typedef __m512 vec;
#    define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#    define SET(x) _mm512_set1_ps(x)
enum { WIDTH = 16 };
#elif defined(__AVX2__) && defined(__FMA__)
#    include <immintrin.h>
typedef __m256 vec;
#    define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#    define SET(x) _mm256_set1_ps(x)
enum { WIDTH = 8 };
#else
typedef float vec __attribute__((vector_size(16)));
#    define FMA(a, b, c) ((a) * (b) + (c))
#    define SET(x) ((vec){x, x, x, x})
enum { WIDTH = 4 };
#endif

// Runs n rounds and returns the floating point operations done. sink keeps the compiler honest.
int64_t fma_rounds(int64_t n, float *sink)
{
    enum { CHAINS = 12 }; // more than latency x units
    vec a[CHAINS], x = SET(0.999f), y = SET(1e-3f);
    for (int i = 0; i < CHAINS; i++) a[i] = SET((float)i);
    for (int64_t r = 0; r < n; r++)
        for (int i = 0; i < CHAINS; i++) a[i] = FMA(a[i], x, y);
    for (int i = 0; i < CHAINS; i++) *sink += ((float *)&a[i])[0];
    return n * CHAINS * WIDTH * 2;
}
