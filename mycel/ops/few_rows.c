/* y = x w^T for a few rows x: each weight is read once, whatever the number of rows.

   x[rows,k] and w[n,k] are floats, or the upper halves of floats (bfloat16); sums are floats.  A product of one row is
   as fast as its weights come from memory: so those of the next rows of w are asked for early. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS 4 /* of y at once, for up to 4 rows; half of it for more: sums stay in registers */
#elif defined(__AVX__)
#define LANES 8
#define COLUMNS 2
#else
#define LANES 4
#define COLUMNS 2
#endif
#define SHARE 64 /* columns of y that a thread takes at once */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float half_floats __attribute__((vector_size(2 * LANES)));
typedef float quarter_floats __attribute__((vector_size(LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline float of_half(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline float of_float(float f) { return f; }
static inline floats lanes_of_float(const float *p) { floats v; memcpy(&v, p, sizeof v); return v; }
static inline floats lanes_of_half(const uint16_t *p) {
  halves h;
  memcpy(&h, p, sizeof h);
  return (floats)(__builtin_convertvector(h, words) << 16);
}
static inline uint16_t half_of(float f) { /* to the nearest, ties to even */
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
static inline float total(floats v) {
  union { floats all; half_floats parts[2]; } first = {v};
  union { half_floats all; quarter_floats parts[2]; } second = {first.parts[0] + first.parts[1]};
  quarter_floats sums = second.parts[0] + second.parts[1];
  float sum = sums[0];
  for (int i = 1; i < LANES / 4; i++) sum += sums[i];
  return sum;
}

/* columns j … j + MANY of y */
#define COLUMNS_OF(T, NAME, ROWS, MANY)                                                                               \
  {                                                                                                                   \
    floats sums[ROWS][MANY];                                                                                          \
    memset(sums, 0, sizeof sums);                                                                                     \
    for (int64_t i = 0; i < whole; i += LANES) {                                                                      \
      floats part[MANY];                                                                                              \
      for (int c = 0; c < MANY; c++) {                                                                                \
        part[c] = lanes_of_##NAME(w + (j + c) * k + i);                                                               \
        __builtin_prefetch(w + (j + c + MANY) * k + i);                                                               \
      }                                                                                                               \
      for (int r = 0; r < ROWS; r++) {                                                                                \
        floats a = lanes_of_float(x + r * k + i);                                                                     \
        for (int c = 0; c < MANY; c++) sums[r][c] += a * part[c];                                                     \
      }                                                                                                               \
    }                                                                                                                 \
    for (int r = 0; r < ROWS; r++)                                                                                    \
      for (int c = 0; c < MANY; c++) {                                                                                \
        float sum = total(sums[r][c]);                                                                                \
        for (int64_t i = whole; i < k; i++) sum += x[r * k + i] * of_##NAME(w[(j + c) * k + i]);                      \
        y[r * n + j + c] = sum;                                                                                       \
      }                                                                                                               \
  }

#define PRODUCT(T, NAME, ROWS, MANY)                                                                                  \
  static void NAME##_##ROWS(const float *x, const T *w, float *y, int64_t k, int64_t n, int64_t j, int64_t end) {     \
    int64_t whole = k / LANES * LANES;                                                                                \
    for (; j + MANY <= end; j += MANY) COLUMNS_OF(T, NAME, ROWS, MANY)                                                \
    for (; j < end; j++) COLUMNS_OF(T, NAME, ROWS, 1)                                                                 \
  }
#define PRODUCTS(T, NAME)                                                                                             \
  PRODUCT(T, NAME, 1, COLUMNS) PRODUCT(T, NAME, 2, COLUMNS) PRODUCT(T, NAME, 3, COLUMNS) PRODUCT(T, NAME, 4, COLUMNS) \
  PRODUCT(T, NAME, 5, COLUMNS / 2) PRODUCT(T, NAME, 6, COLUMNS / 2) PRODUCT(T, NAME, 7, COLUMNS / 2)                  \
  PRODUCT(T, NAME, 8, COLUMNS / 2)
PRODUCTS(float, float)
PRODUCTS(uint16_t, half)

#define TABLE(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8}
typedef void of_floats(const float *, const float *, float *, int64_t, int64_t, int64_t, int64_t);
typedef void of_halves(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t, int64_t);
static of_floats *const BY_FLOATS[] = TABLE(float);
static of_halves *const BY_HALVES[] = TABLE(half);

/* 1 to 8 rows; -1: no memory for wider copies of x and y */
int mycel_few_rows(const void *x, const void *w, void *y, int64_t rows, int64_t k, int64_t n, int half) {
  const float *wide = x;
  float *sums = y, *room = NULL;
  if (half) {
    room = malloc((size_t)(rows * (k + n)) * sizeof(float));
    if (!room) return -1;
    for (int64_t i = 0; i < rows * k; i++) room[i] = of_half(((const uint16_t *)x)[i]);
    wide = room;
    sums = room + rows * k;
  }
#pragma omp parallel for schedule(static) if (n >= 2 * SHARE)
  for (int64_t j = 0; j < n; j += SHARE) {
    int64_t end = j + SHARE < n ? j + SHARE : n;
    if (half) BY_HALVES[rows - 1](wide, w, sums, k, n, j, end);
    else BY_FLOATS[rows - 1](wide, w, sums, k, n, j, end);
  }
  for (int64_t i = 0; half && i < rows * n; i++) ((uint16_t *)y)[i] = half_of(sums[i]);
  free(room);
  return 0;
}
