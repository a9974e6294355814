/* bf16, fp16, fp8, sign and topk on the CPU: encode with what is left over in one pass, decode and add in one pass.

   Rows, blocks and their bytes are those of codec_kernels.py, whose torch kernels make the same bits: compile with
   -ffp-contract=off.  A form is two functions of one block in the nearest cache, values to bytes and back; what all
   forms do alike (rows, blocks that are not full, errors, sums) is at the end. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4096 /* floats in the largest block */
#define INLINE static inline __attribute__((always_inline))
#define TINY 1e-35f
#define INFINITE 0x7F800000u

enum { BF16, FP16, FP8, SIGN, TOPK };

typedef struct { int64_t block, kept; int stochastic; uint32_t key, first; } how;

INLINE float of_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
INLINE uint32_t bits_of(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
INLINE uint32_t size_of(float f) { return bits_of(f) & 0x7FFFFFFFu; } /* ordered as |f|, NaN above all */

/* 24 bits for the element `i`: murmur3's end */
INLINE uint32_t drawn(uint32_t key, uint32_t i) {
  uint32_t h = (i * 0x9E3779B1u) ^ key;
  h ^= h >> 16; h *= 0x85EBCA6Bu;
  h ^= h >> 13; h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h >> 8;
}

INLINE uint32_t largest(const float *v, int64_t block) {
  uint32_t top = 0;
  for (int64_t i = 0; i < block; i++) {
    uint32_t size = size_of(v[i]);
    top = size > top ? size : top;
  }
  return top;
}

/* -- bf16 */

/* the nearest, halves to even; finite numbers stay finite */
INLINE uint16_t bf16_of(float x) {
  uint32_t b = bits_of(x), size = b & 0x7FFFFFFFu;
  uint32_t near = (size + 0x7FFFu + ((size >> 16) & 1)) >> 16;
  near = near > 0x7F7Fu ? 0x7F7Fu : near;
  near = size < INFINITE ? near : 0x7F80u;
  return (uint16_t)(size > INFINITE ? 0x7FC0u : near | (b >> 31 << 15));
}

INLINE uint16_t bf16_by_chance(float x, uint32_t more) {
  uint32_t b = bits_of(x), size = b & 0x7FFFFFFFu;
  uint32_t cut = size > 0x7F7F0000u && size < INFINITE ? 0x7F7F0000u : size;
  cut = size < INFINITE ? cut + more : size;
  return (uint16_t)(size > INFINITE ? 0x7FC0u : (cut | (b & 0x80000000u)) >> 16);
}

INLINE void bf16_encode(const float *v, uint8_t *out, how h) {
  uint16_t code[MOST];
  if (h.stochastic)
    for (int64_t i = 0; i < h.block; i++) code[i] = bf16_by_chance(v[i], drawn(h.key, h.first + (uint32_t)i) >> 8);
  else
    for (int64_t i = 0; i < h.block; i++) code[i] = bf16_of(v[i]);
  memcpy(out, code, 2 * (size_t)h.block);
}

INLINE void bf16_decode(const uint8_t *in, float *y, how h) {
  uint16_t code[MOST];
  memcpy(code, in, 2 * (size_t)h.block);
  for (int64_t i = 0; i < h.block; i++) y[i] = of_bits((uint32_t)code[i] << 16);
}

/* -- fp16, with the power of two that brings the largest below 2^15 */

INLINE void fp16_encode(const float *v, uint8_t *out, how h) {
  _Float16 code[MOST];
  uint32_t top = largest(v, h.block);
  float scale = 1.0f;
  if (top >= INFINITE) scale = of_bits(0x7FC00000u);
  else if (of_bits(top) >= TINY) {
    int exponent = (int)(top >> 23) - 126 - 15; /* TINY is no denormal number */
    scale = exponent >= -126 ? of_bits((uint32_t)(exponent + 127) << 23) : of_bits(1u << (exponent + 149));
  }
  for (int64_t i = 0; i < h.block; i++) code[i] = (_Float16)(v[i] / scale);
  memcpy(out, &scale, 4);
  memcpy(out + 4, code, 2 * (size_t)h.block);
}

INLINE void fp16_decode(const uint8_t *in, float *y, how h) {
  _Float16 code[MOST];
  float scale;
  memcpy(&scale, in, 4);
  memcpy(code, in + 4, 2 * (size_t)h.block);
  for (int64_t i = 0; i < h.block; i++) y[i] = (float)code[i] * scale;
}

/* -- fp8 (e4m3, without infinities) */

/* the nearest, halves to even, of |x| <= 448 */
INLINE uint8_t fp8_of(float x) {
  uint32_t b = bits_of(x), size = b & 0x7FFFFFFFu;
  uint32_t small = bits_of(of_bits(size) + 0x1p14f) - bits_of(0x1p14f); /* below 2^-6: its last bit is 2^-9 */
  uint32_t large = (size + (uint32_t)(7 - 127) * 0x800000u + 0x7FFFFu + ((size >> 20) & 1)) >> 20;
  return (uint8_t)((size < (121u << 23) ? small : large) | (b >> 31 << 7));
}

INLINE float fp8_value(uint8_t code) {
  uint32_t size = code & 0x7Fu, sign = (uint32_t)(code & 0x80u) << 24;
  float small = (float)(int32_t)size * 0x1p-9f;
  float large = of_bits((size << 20) + ((uint32_t)(127 - 7) << 23));
  float value = size < 8 ? small : size == 0x7Fu ? of_bits(0x7FC00000u) : large;
  return of_bits(bits_of(value) | sign);
}

INLINE void fp8_encode(const float *v, uint8_t *out, how h) {
  uint32_t top = largest(v, h.block);
  float scale = 0.0f, inverse = 0.0f;
  int finite = top < INFINITE;
  if (!finite) scale = of_bits(0x7FC00000u);
  else if (of_bits(top) >= TINY) { scale = of_bits(top) / 448.0f; inverse = 448.0f / of_bits(top); }
  memcpy(out, &scale, 4);
  out += 4;
  if (!finite) memset(out, 0, (size_t)h.block);
  else for (int64_t i = 0; i < h.block; i++) out[i] = fp8_of(v[i] * inverse);
}

INLINE void fp8_decode(const uint8_t *in, float *y, how h) {
  float scale;
  memcpy(&scale, in, 4);
  for (int64_t i = 0; i < h.block; i++) y[i] = fp8_value(in[4 + i]) * scale;
}

/* -- sign: bit j of byte i is element j * block / 8 + i; beside it the mean of |x|, its halves added first */

INLINE void sign_encode(const float *v, uint8_t *out, how h) {
  float sums[MOST], share = (float)(1.0 / (double)h.block);
  for (int64_t i = 0; i < h.block; i++) sums[i] = __builtin_fabsf(v[i]) * share;
  for (int64_t n = h.block; n > 1; n = (n + 1) / 2) {
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) sums[i] += sums[half + i];
    if (n & 1) sums[half] = sums[n - 1];
  }
  float scale = size_of(sums[0]) < INFINITE ? sums[0] : of_bits(0x7FC00000u);
  memcpy(out, &scale, 4);
  int64_t eighth = h.block / 8;
  for (int64_t i = 0; i < eighth; i++) {
    uint32_t code = 0;
    for (int j = 0; j < 8; j++) code |= (uint32_t)(v[j * eighth + i] >= 0.0f) << j;
    out[4 + i] = (uint8_t)code;
  }
}

INLINE void sign_decode(const uint8_t *in, float *y, how h) {
  float scale;
  memcpy(&scale, in, 4);
  int64_t eighth = h.block / 8;
  for (int j = 0; j < 8; j++)
    for (int64_t i = 0; i < eighth; i++) y[j * eighth + i] = (in[4 + i] >> j & 1) ? scale : -scale;
}

/* -- topk: places in 16 bits, then values in bf16; the largest first, of equal ones the first */

static int falling(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x < y) - (x > y);
}

/* Elements by the first 11 bits of their size: all above the bin in which the last one lies, and that bin sorted. */
INLINE void topk_encode(const float *v, uint8_t *out, how h) {
  uint16_t counts[2048] = {0}, places[MOST], values[MOST];
  uint64_t all[MOST], last[MOST]; /* size, then place turned around: sorting both ways in one */
  for (int64_t i = 0; i < h.block; i++) counts[size_of(v[i]) >> 20]++;
  int64_t bin = 2047, above = 0, n = 0, m = 0;
  while (above + counts[bin] < h.kept) above += counts[bin--];
  for (int64_t i = 0; i < h.block; i++) {
    uint32_t size = size_of(v[i]);
    if ((int64_t)(size >> 20) < bin) continue;
    uint64_t key = (uint64_t)(size > INFINITE ? INFINITE + 1 : size) << 32 | (uint32_t)(MOST - i);
    if ((int64_t)(size >> 20) > bin) all[n++] = key;
    else last[m++] = key;
  }
  qsort(last, (size_t)m, sizeof *last, falling);
  for (int64_t i = 0; n < h.kept; i++) all[n++] = last[i];
  qsort(all, (size_t)n, sizeof *all, falling);
  for (int64_t k = 0; k < h.kept; k++) {
    int64_t at = MOST - (int64_t)(uint32_t)all[k];
    places[k] = (uint16_t)at;
    values[k] = bf16_of(v[at]);
  }
  memcpy(out, places, 2 * (size_t)h.kept);
  memcpy(out + 2 * h.kept, values, 2 * (size_t)h.kept);
}

INLINE void topk_decode(const uint8_t *in, float *y, how h) {
  memset(y, 0, 4 * (size_t)h.block);
  for (int64_t k = 0; k < h.kept; k++) {
    int16_t at;
    uint16_t value;
    memcpy(&at, in + 2 * k, 2);
    memcpy(&value, in + 2 * (h.kept + k), 2);
    y[at < 0 ? 0 : at < h.block ? at : h.block - 1] = of_bits((uint32_t)value << 16);
  }
}

/* -- what all forms do alike */

typedef void coder(const float *, const float *, uint8_t *, float *, how);
typedef void decoder(const uint8_t *, float *, int64_t, int, how);

/* A whole block of x + e (e may be NULL) -> its bytes; `left` (may be NULL, x or e): what these leave over.  And bytes
   -> `count` values, written or added. */
#define FORM(name)                                                                                                \
  static void encode_##name(const float *x, const float *e, uint8_t *out, float *left, how h) {                   \
    float v[MOST], y[MOST];                                                                                       \
    if (e) for (int64_t i = 0; i < h.block; i++) v[i] = x[i] + e[i];                                              \
    else memcpy(v, x, 4 * (size_t)h.block);                                                                       \
    name##_encode(v, out, h);                                                                                     \
    if (!left) return;                                                                                            \
    name##_decode(out, y, h);                                                                                     \
    for (int64_t i = 0; i < h.block; i++) left[i] = v[i] - y[i];                                                  \
  }                                                                                                               \
  static void decode_##name(const uint8_t *in, float *out, int64_t count, int add, how h) {                       \
    float y[MOST];                                                                                                \
    name##_decode(in, y, h);                                                                                      \
    if (add) for (int64_t i = 0; i < count; i++) out[i] += y[i];                                                  \
    else if (count > 0) memcpy(out, y, 4 * (size_t)count);                                                        \
  }

FORM(bf16)
FORM(fp16)
FORM(fp8)
FORM(sign)
FORM(topk)

static coder *const CODERS[] = {encode_bf16, encode_fp16, encode_fp8, encode_sign, encode_topk};
static decoder *const DECODERS[] = {decode_bf16, decode_fp16, decode_fp8, decode_sign, decode_topk};

static int64_t bytes_of(int form, int64_t block, int64_t kept) {
  switch (form) {
    case BF16: return 2 * block;
    case FP16: return 4 + 2 * block;
    case FP8: return 4 + block;
    case SIGN: return 4 + block / 8;
    default: return 4 * kept;
  }
}

/* x + e (e may be NULL) -> bytes of all rows; `left` (may be NULL, x or e): what these leave over */
void mycel_encode(const float *x, const float *e, uint8_t *out, float *left, int64_t n, int64_t rows, int64_t row,
                  int64_t block, int64_t kept, int form, int stochastic, uint32_t key) {
  int64_t blocks = (row + block - 1) / block, size = bytes_of(form, block, kept);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < blocks; b++, out += size) {
      int64_t at = r * row + b * block, end = (r + 1) * row < n ? (r + 1) * row : n;
      how h = {block, kept, stochastic, key, (uint32_t)((r * blocks + b) * block)};
      if (at + block <= end) {
        CODERS[form](x + at, e ? e + at : 0, out, left ? left + at : 0, h);
        continue;
      }
      float all_x[MOST], all_e[MOST], all_left[MOST];
      size_t filled = at < end ? 4 * (size_t)(end - at) : 0;
      memset(all_x, 0, 4 * (size_t)block);
      memset(all_e, 0, 4 * (size_t)block);
      if (filled) memcpy(all_x, x + at, filled);
      if (filled && e) memcpy(all_e, e + at, filled);
      CODERS[form](all_x, e ? all_e : 0, out, left ? all_left : 0, h);
      if (filled && left) memcpy(left + at, all_left, filled);
    }
}

/* bytes of all rows -> out[n]: the rows one behind the other, or with `sum` added up in their order (n <= row) */
void mycel_decode(const uint8_t *in, float *out, int64_t n, int64_t rows, int64_t row, int64_t block, int64_t kept,
                  int form, int sum) {
  int64_t blocks = (row + block - 1) / block, size = bytes_of(form, block, kept);
  how h = {block, kept, 0, 0, 0};
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t r = 0; r < rows; r++) {
      int64_t start = sum ? 0 : r * row, at = start + b * block, end = start + row < n ? start + row : n;
      int64_t count = at >= end ? 0 : end - at < block ? end - at : block;
      DECODERS[form](in + (r * blocks + b) * size, out + at, count, sum && r, h);
    }
}

/* e (1 - share) + lost share as 8 bits (e5m2) times `scale`, up or down by chance: the upper half of 16 bits */
void mycel_averaged(const float *e, const float *lost, uint8_t *out, int64_t n, float kept, float share, float scale,
                    float most, uint32_t key) {
  for (int64_t i = 0; i < n; i++) {
    float y = (e[i] * kept + lost[i] * share) * scale;
    y = y > most ? most : y < -most ? -most : y;
    _Float16 half = (_Float16)y;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    bits = (uint16_t)(bits + (drawn(key, (uint32_t)i) >> 16));
    out[i] = y == y ? (uint8_t)(bits >> 8) : 0x7F;
  }
}
