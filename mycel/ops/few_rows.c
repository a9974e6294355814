/* y = x w^T for a few rows x: each weight is read once, whatever the number of rows.

   x[rows,k] and w[n,k] are floats, or the upper halves of floats (bfloat16); or w is bytes, each row with a scale.
   Sums are floats.  A product of one row is as fast as its weights come from memory: so those of the next rows of w are
   asked for early, and there are as many sums at once as a processor needs to be busy.

   Of halves two are read as one word: the even ones are its lower half, moved up, the odd ones its upper half.  So rows
   of x are laid out the same way before: of each 2 LANES numbers first the even ones, then the odd ones.  Of bytes it
   is four: of each 4 LANES numbers first each fourth one, then those behind them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "elements.h"

#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS(ROWS) (ROWS <= 4 ? 4 : 2) /* of y at once: sums stay in registers */
#define DEEP(ROWS) 1                      /* sums of each, of weights that follow each other */
#elif defined(__AVX__)
#define LANES 8
#define COLUMNS(ROWS) (ROWS <= 4 ? 2 : 1)
#define DEEP(ROWS) 1
#elif defined(__aarch64__) /* whose memory is fastest read in one stream: Neoverse N1, 39 GB/s instead of 27 */
#define LANES 4
#define COLUMNS(ROWS) (ROWS <= 3 ? 1 : ROWS == 4 ? 4 : 2)
#define DEEP(ROWS) (ROWS == 1 ? 8 : ROWS <= 3 ? 4 : 1)
#else
#define LANES 4
#define COLUMNS(ROWS) (ROWS <= 4 ? 2 : 1)
#define DEEP(ROWS) 1
#endif
#define SHARE 64 /* columns of y that a thread takes at once */
#define LINE 64  /* bytes that come from memory at once */
#define AHEAD 1024

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float half_floats __attribute__((vector_size(2 * LANES)));
typedef float quarter_floats __attribute__((vector_size(LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t signed_words __attribute__((vector_size(4 * LANES)));

static inline float of_float(float f) { return f; }
static inline float of_byte(int8_t b) { return b; }
static inline floats lanes(const void *p) { floats v; memcpy(&v, p, sizeof v); return v; }
static inline float total(floats v) {
  union { floats all; half_floats parts[2]; } first = {v};
  union { half_floats all; quarter_floats parts[2]; } second = {first.parts[0] + first.parts[1]};
  quarter_floats sums = second.parts[0] + second.parts[1];
  float sum = sums[0];
  for (int i = 1; i < LANES / 4; i++) sum += sums[i];
  return sum;
}

/* the weights at p, as many as a vector of bytes holds: MANY_… vectors of floats */
#define MANY_float 1
#define MANY_half 2
#define MANY_byte 4
static inline void read_float(const float *p, floats *part) { part[0] = lanes(p); }
static inline void read_half(const uint16_t *p, floats *part) {
  words pairs = (words)lanes(p);
  part[0] = (floats)(pairs << 16);
  part[1] = (floats)(pairs & 0xFFFF0000u);
}
static inline void read_byte(const int8_t *p, floats *part) {
  words fours = (words)lanes(p);
  for (int m = 0; m < MANY_byte; m++)
    part[m] = __builtin_convertvector((signed_words)(fours << (24 - 8 * m)) >> 24, floats);
}

/* weights at i of columns j … j + WIDE, times all rows; the next ones are asked for: of other columns, or where there
   is one at a time further on in its row */
#define TIMES(T, NAME, ROWS, WIDE, i, d)                                                                              \
  {                                                                                                                   \
    floats part[WIDE][MANY_##NAME];                                                                                   \
    int is_line = (i) % (LINE / (int64_t)sizeof(T)) == 0;                                                             \
    for (int c = 0; c < WIDE; c++) {                                                                                  \
      read_##NAME(w + (j + c) * k + i, part[c]);                                                                      \
      int64_t next = COLUMNS(ROWS) == 1 ? AHEAD / (int64_t)sizeof(T) : WIDE * k;                                      \
      if (is_line) __builtin_prefetch(w + (j + c) * k + i + next);                                                    \
    }                                                                                                                 \
    for (int r = 0; r < ROWS; r++)                                                                                    \
      for (int m = 0; m < MANY_##NAME; m++) {                                                                         \
        floats a = lanes(x + r * k + i + m * LANES);                                                                  \
        for (int c = 0; c < WIDE; c++) sums[r][c][d] += a * part[c][m];                                               \
      }                                                                                                               \
  }

/* columns j … j + WIDE of y */
#define COLUMNS_OF(T, NAME, ROWS, WIDE)                                                                               \
  {                                                                                                                   \
    floats sums[ROWS][WIDE][DEEP(ROWS)];                                                                              \
    memset(sums, 0, sizeof sums);                                                                                     \
    int64_t i = 0, one = MANY_##NAME * LANES;                                                                         \
    for (; i + DEEP(ROWS) * one <= k; i += DEEP(ROWS) * one)                                                          \
      for (int d = 0; d < DEEP(ROWS); d++) TIMES(T, NAME, ROWS, WIDE, i + d * one, d)                                 \
    for (; DEEP(ROWS) > 1 && i + one <= k; i += one) TIMES(T, NAME, ROWS, WIDE, i, 0)                                 \
    for (int r = 0; r < ROWS; r++)                                                                                    \
      for (int c = 0; c < WIDE; c++) {                                                                                \
        for (int d = 1; d < DEEP(ROWS); d++) sums[r][c][0] += sums[r][c][d];                                          \
        float sum = total(sums[r][c][0]);                                                                             \
        for (int64_t rest = i; rest < k; rest++) sum += x[r * k + rest] * of_##NAME(w[(j + c) * k + rest]);           \
        y[r * n + j + c] = sum;                                                                                       \
      }                                                                                                               \
  }

#define PRODUCT(T, NAME, ROWS)                                                                                        \
  static void NAME##_##ROWS(const float *x, const T *w, float *y, int64_t k, int64_t n, int64_t j, int64_t end) {     \
    for (; j + COLUMNS(ROWS) <= end; j += COLUMNS(ROWS)) COLUMNS_OF(T, NAME, ROWS, COLUMNS(ROWS))                     \
    for (; j < end; j++) COLUMNS_OF(T, NAME, ROWS, 1)                                                                 \
  }
#define PRODUCTS(T, NAME)                                                                                             \
  PRODUCT(T, NAME, 1) PRODUCT(T, NAME, 2) PRODUCT(T, NAME, 3) PRODUCT(T, NAME, 4)                                     \
  PRODUCT(T, NAME, 5) PRODUCT(T, NAME, 6) PRODUCT(T, NAME, 7) PRODUCT(T, NAME, 8)
PRODUCTS(float, float)
PRODUCTS(uint16_t, half)
PRODUCTS(int8_t, byte)

#define TABLE(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8}
typedef void of_floats(const float *, const float *, float *, int64_t, int64_t, int64_t, int64_t);
typedef void of_halves(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t, int64_t);
typedef void of_bytes(const float *, const int8_t *, float *, int64_t, int64_t, int64_t, int64_t);
static of_floats *const BY_FLOATS[] = TABLE(float);
static of_halves *const BY_HALVES[] = TABLE(half);
static of_bytes *const BY_BYTES[] = TABLE(byte);

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

/* a row of floats in the order in which bytes are read */
static void apart(const float *x, float *ordered, int64_t k) {
  int64_t i = 0;
  for (; i + 4 * LANES <= k; i += 4 * LANES)
    for (int l = 0; l < LANES; l++)
      for (int m = 0; m < 4; m++) ordered[i + m * LANES + l] = x[i + 4 * l + m];
  memcpy(ordered + i, x + i, (size_t)(k - i) * sizeof(float));
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

/* 1 to 8 rows of floats, weights in bytes, each row of them times its scale; -1: no memory for another order of x */
int mycel_few_rows_of_bytes(const float *x, const int8_t *w, const float *scale, float *y, int64_t rows, int64_t k,
                            int64_t n) {
  float *ordered = malloc((size_t)(rows * k) * sizeof(float));
  if (!ordered) return -1;
  for (int64_t r = 0; r < rows; r++) apart(x + r * k, ordered + r * k, k);
#pragma omp parallel for schedule(static) if (n >= 2 * SHARE)
  for (int64_t j = 0; j < n; j += SHARE) {
    int64_t end = j + SHARE < n ? j + SHARE : n;
    BY_BYTES[rows - 1](ordered, w, y, k, n, j, end);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = j; c < end; c++) y[r * n + c] *= scale[c];
  }
  free(ordered);
  return 0;
}

/* y[i] = a . the i-th of the rows of b that `places` names: four at once */
static void dots(const float *a, const float *b, const int32_t *places, int64_t count, int64_t k, float scale,
                 float *y) {
  for (int64_t i = 0; i < count; i += 4) {
    floats sums[4] = {{0}, {0}, {0}, {0}};
    const float *row[4];
    for (int d = 0; d < 4; d++) row[d] = b + places[i + d < count ? i + d : count - 1] * k;
    int64_t j = 0;
    for (; j + LANES <= k; j += LANES) {
      floats part = lanes(a + j);
      for (int d = 0; d < 4; d++) sums[d] += part * lanes(row[d] + j);
    }
    for (int d = 0; d < 4 && i + d < count; d++) {
      float sum = total(sums[d]);
      for (int64_t rest = j; rest < k; rest++) sum += a[rest] * row[d][rest];
      y[i + d] = scale * sum;
    }
  }
}

/* Attention of a few rows q[b,h,rows,k] to k[b,g,places,k] and v[b,g,places,n], y[b,h,rows,n]; places that a row does
   not see (mask, with its steps from one of b, h and rows to the next) are not read: those of a cache that is not full.
   -1: no memory for scores */
int mycel_few_rows_attention(const float *q, const float *keys, const float *values, const uint8_t *mask, float *y,
                             int64_t batch, int64_t heads, int64_t groups, int64_t rows, int64_t places, int64_t k,
                             int64_t n, const int64_t *steps, float scale) {
  int failed = 0;
#pragma omp parallel for schedule(static) if (batch * heads * rows * places * k > (1 << 16))
  for (int64_t head = 0; head < batch * heads; head++) {
    int64_t b = head / heads, h = head % heads, group = b * groups + h / (heads / groups);
    float *scores = malloc((size_t)(places + 1) * (sizeof(float) + sizeof(int32_t)));
    int32_t *at = (int32_t *)(scores + places + 1);
    for (int64_t r = 0; scores && r < rows; r++) {
      const uint8_t *seen = mask ? mask + b * steps[0] + h * steps[1] + r * steps[2] : NULL;
      const float *row = q + (head * rows + r) * k;
      float *restrict out = y + (head * rows + r) * n;
      float most = -INFINITY, sum = 0;
      int64_t count = 0;
      for (int64_t j = 0; j < places; j++)
        if (!seen || seen[j]) at[count++] = (int32_t)j;
      dots(row, keys + group * places * k, at, count, k, scale, scores);
      for (int64_t i = 0; i < count; i++) most = scores[i] > most ? scores[i] : most;
      for (int64_t i = 0; i < count; i++) scores[i] = exp_of(scores[i] - most);
      memset(out, 0, (size_t)n * sizeof(float));
      for (int64_t i = 0; i < count; i++) {
        const float *value = values + (group * places + at[i]) * n;
        sum += scores[i];
        for (int64_t c = 0; c < n; c++) out[c] += scores[i] * value[c];
      }
      for (int64_t c = 0; sum != 0 && c < n; c++) out[c] /= sum; /* a row that sees nothing is zeros */
    }
    if (!scores) failed = -1;
    free(scores);
  }
  return failed;
}
