/* y = x w^T for a few rows x: each weight is read once, whatever the number of rows.

   x[rows,k] and w[n,k] are floats, or the upper halves of floats (bfloat16); sums are floats.  A product of one row is
   as fast as its weights come from memory: so those of the next rows of w are asked for early, and there are as many
   sums at once as a processor needs to be busy.

   Of halves two are read as one word: the even ones are its lower half, moved up, the odd ones its upper half.  So rows
   of x are laid out the same way before: of each 2 LANES numbers first the even ones, then the odd ones. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS(ROWS) (ROWS <= 4 ? 4 : 2) /* of y at once: sums stay in registers */
#elif defined(__AVX__)
#define LANES 8
#define COLUMNS(ROWS) (ROWS <= 4 ? 2 : 1)
#elif defined(__aarch64__)
#define LANES 4
#define COLUMNS(ROWS) (ROWS <= 4 ? 4 : 2)
#else
#define LANES 4
#define COLUMNS(ROWS) (ROWS <= 4 ? 2 : 1)
#endif
#define SHARE 64 /* columns of y that a thread takes at once */
#define LINE 64  /* bytes that come from memory at once */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float half_floats __attribute__((vector_size(2 * LANES)));
typedef float quarter_floats __attribute__((vector_size(LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline float of_half(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline float of_float(float f) { return f; }
static inline floats lanes(const void *p) { floats v; memcpy(&v, p, sizeof v); return v; }
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

/* the weights at p, as many as a vector of bytes holds: MANY_float or MANY_half vectors of floats */
#define MANY_float 1
#define MANY_half 2
static inline void read_float(const float *p, floats *part) { part[0] = lanes(p); }
static inline void read_half(const uint16_t *p, floats *part) {
  words pairs = (words)lanes(p);
  part[0] = (floats)(pairs << 16);
  part[1] = (floats)(pairs & 0xFFFF0000u);
}

/* columns j … j + WIDE of y */
#define COLUMNS_OF(T, NAME, ROWS, WIDE)                                                                               \
  {                                                                                                                   \
    floats sums[ROWS][WIDE];                                                                                          \
    memset(sums, 0, sizeof sums);                                                                                     \
    for (int64_t i = 0; i < whole; i += MANY_##NAME * LANES) {                                                        \
      floats part[WIDE][MANY_##NAME];                                                                                 \
      int is_line = i % (LINE / (int64_t)sizeof(T)) == 0;                                                             \
      for (int c = 0; c < WIDE; c++) {                                                                                \
        read_##NAME(w + (j + c) * k + i, part[c]);                                                                    \
        if (is_line) __builtin_prefetch(w + (j + c + WIDE) * k + i);                                                  \
      }                                                                                                               \
      for (int r = 0; r < ROWS; r++)                                                                                  \
        for (int m = 0; m < MANY_##NAME; m++) {                                                                       \
          floats a = lanes(x + r * k + i + m * LANES);                                                                \
          for (int c = 0; c < WIDE; c++) sums[r][c] += a * part[c][m];                                                \
        }                                                                                                             \
    }                                                                                                                 \
    for (int r = 0; r < ROWS; r++)                                                                                    \
      for (int c = 0; c < WIDE; c++) {                                                                                \
        float sum = total(sums[r][c]);                                                                                \
        for (int64_t i = whole; i < k; i++) sum += x[r * k + i] * of_##NAME(w[(j + c) * k + i]);                      \
        y[r * n + j + c] = sum;                                                                                       \
      }                                                                                                               \
  }

#define PRODUCT(T, NAME, ROWS)                                                                                        \
  static void NAME##_##ROWS(const float *x, const T *w, float *y, int64_t k, int64_t n, int64_t j, int64_t end) {     \
    int64_t whole = k / (MANY_##NAME * LANES) * (MANY_##NAME * LANES);                                                \
    for (; j + COLUMNS(ROWS) <= end; j += COLUMNS(ROWS)) COLUMNS_OF(T, NAME, ROWS, COLUMNS(ROWS))                     \
    for (; j < end; j++) COLUMNS_OF(T, NAME, ROWS, 1)                                                                 \
  }
#define PRODUCTS(T, NAME)                                                                                             \
  PRODUCT(T, NAME, 1) PRODUCT(T, NAME, 2) PRODUCT(T, NAME, 3) PRODUCT(T, NAME, 4)                                     \
  PRODUCT(T, NAME, 5) PRODUCT(T, NAME, 6) PRODUCT(T, NAME, 7) PRODUCT(T, NAME, 8)
PRODUCTS(float, float)
PRODUCTS(uint16_t, half)

#define TABLE(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8}
typedef void of_floats(const float *, const float *, float *, int64_t, int64_t, int64_t, int64_t);
typedef void of_halves(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t, int64_t);
static of_floats *const BY_FLOATS[] = TABLE(float);
static of_halves *const BY_HALVES[] = TABLE(half);

/* a row of halves as floats, even ones and odd ones apart */
static void widen(const uint16_t *x, float *wide, int64_t k) {
  int64_t i = 0;
  for (; i + 2 * LANES <= k; i += 2 * LANES)
    for (int m = 0; m < LANES; m++) {
      wide[i + m] = of_half(x[i + 2 * m]);
      wide[i + LANES + m] = of_half(x[i + 2 * m + 1]);
    }
  for (; i < k; i++) wide[i] = of_half(x[i]);
}

/* 1 to 8 rows; -1: no memory for wider copies of x and y */
int mycel_few_rows(const void *x, const void *w, void *y, int64_t rows, int64_t k, int64_t n, int half) {
  const float *wide = x;
  float *sums = y, *room = NULL;
  if (half) {
    room = malloc((size_t)(rows * (k + n)) * sizeof(float));
    if (!room) return -1;
    for (int64_t r = 0; r < rows; r++) widen((const uint16_t *)x + r * k, room + r * k, k);
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
