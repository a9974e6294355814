/* int8 and int4 in blocks, on the CPU: encode with what is left over in one pass, decode and add in one pass.

   A row of `row` floats is ceil(row / block) blocks, the last one filled up with zeros; of n floats the rows are cut
   one behind the other.  A block is its scale (a float), then its codes: int8 one a byte, int4 element i in the low
   and element i + block / 2 in the high half of byte i, plus 8.  Bits are those of the torch kernels (codec_kernels.py):
   compile with -ffp-contract=off.

   A block is read once, sixteen floats at a time, and lies in registers or the nearest cache until it is written. */

#include <stdint.h>
#include <string.h>

#define MOST 4096 /* floats in the largest block */
#define WIDE 16   /* floats at a time: blocks are multiples of it */
#define AHEAD 512 /* floats that are fetched before they are needed: the next blocks, while this one is written */
#define INLINE static inline __attribute__((always_inline))

/* vectors of any compiler for any processor; in memory they lie anywhere */
typedef float floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t whole __attribute__((vector_size(4 * WIDE)));
typedef uint32_t bits32 __attribute__((vector_size(4 * WIDE)));
typedef int8_t bytes __attribute__((vector_size(WIDE)));

INLINE floats load(const float *x) { floats v; memcpy(&v, x, sizeof v); return v; }
INLINE void store(float *x, floats v) { memcpy(x, &v, sizeof v); }
INLINE whole larger(whole a, whole b) { whole m = a > b; return (a & m) | (b & ~m); }
INLINE float of_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }

/* [0, 1) for the elements `i`: murmur3's end */
INLINE floats unit(uint32_t key, bits32 i) {
  bits32 h = (i * 0x9E3779B1u) ^ key;
  h ^= h >> 16; h *= 0x85EBCA6Bu;
  h ^= h >> 13; h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return __builtin_convertvector((whole)(h >> 8), floats) * 0x1p-24f;
}

/* |y| < 2^22 to the nearest whole number, halves to even: added to this, a float has no bits behind the point */
#define NEAREST 0x1.8p23f

INLINE whole rounded(floats y, float levels, int stochastic, uint32_t key, uint32_t first) {
  if (!stochastic) {
    floats shifted = y + NEAREST, zero = (floats){0} + NEAREST;
    return (whole)shifted - (whole)zero;
  }
  const bits32 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  y += unit(key, places + first);
  whole down = __builtin_convertvector(y, whole);
  down += __builtin_convertvector(down, floats) > y; /* -1 where that was rounded up: towards zero */
  whole most = (whole){0} + (int32_t)levels;
  return larger(-larger(-down, -most), -most);
}

/* One whole block, x + e (e may be NULL) -> its scale and codes; `left` (may be NULL): what the codes leave over.  All
   but the pointers and the place is known where this is called, so that no choice is left in the loops. */
INLINE void encode_block(const float *x, const float *e, uint8_t *out, float *left, int64_t block, int bits,
                         int stochastic, uint32_t key, uint32_t first) {
  floats v[MOST / WIDE];
  whole top = {0}; /* of the bits of |v|: as integers NaN is above infinity, and infinity above all numbers */
  int64_t count = block / WIDE;
  for (int64_t k = 0; k < count; k++) {
    __builtin_prefetch(x + k * WIDE + AHEAD);
    v[k] = load(x + k * WIDE);
    if (e) __builtin_prefetch(e + k * WIDE + AHEAD);
    if (e) v[k] += load(e + k * WIDE);
    if (left) __builtin_prefetch(left + k * WIDE + AHEAD, 1);
    whole size = (whole)v[k] & 0x7FFFFFFF;
    top = larger(size, top);
  }
  int32_t largest_bits = 0;
  for (int i = 0; i < WIDE; i++) largest_bits = top[i] > largest_bits ? top[i] : largest_bits;
  float levels = bits == 8 ? 127.0f : 7.0f, largest = of_bits((uint32_t)largest_bits), scale = 0.0f, inverse = 0.0f;
  int finite = largest_bits < 0x7F800000;
  if (finite && largest >= 1e-35f) { scale = largest / levels; inverse = levels / largest; }
  if (!finite) { /* NaN for the whole block */
    scale = of_bits(0x7FC00000u);
    memset(out + 4, bits == 8 ? 0 : 0x88, (size_t)(bits == 8 ? block : block / 2));
    for (int64_t k = 0; left && k < count; k++) store(left + k * WIDE, (floats){0} + scale);
  }
  bytes codes[MOST / WIDE];
  for (int64_t k = 0; finite && k < count; k++) {
    whole q = rounded(v[k] * inverse, levels, stochastic, key, first + (uint32_t)(k * WIDE));
    bytes narrow = __builtin_convertvector(q, bytes);
    if (bits == 8) memcpy(out + 4 + k * WIDE, &narrow, WIDE);
    else codes[k] = narrow + 8;
    if (left) store(left + k * WIDE, v[k] - __builtin_convertvector(q, floats) * scale);
  }
  int64_t half = block / 2, pairs = count % 2 ? 0 : count / 2;
  for (int64_t k = 0; bits == 4 && finite && k < pairs; k++) {
    bytes both = codes[k] | codes[k + pairs] << 4;
    memcpy(out + 4 + k * WIDE, &both, WIDE);
  }
  const uint8_t *each = (const uint8_t *)codes;
  for (int64_t i = pairs * WIDE; bits == 4 && finite && i < half; i++)
    out[4 + i] = (uint8_t)(each[i] | each[i + half] << 4);
  memcpy(out, &scale, 4);
}

typedef void encoder(const float *, const float *, uint8_t *, float *, int64_t, uint32_t, uint32_t);

#define ENCODER(name, block, bits, stochastic)                                                                    \
  static void name(const float *x, const float *e, uint8_t *out, float *left, int64_t any, uint32_t key,          \
                   uint32_t first) {                                                                              \
    (void)any;                                                                                                    \
    if (e && left) encode_block(x, e, out, left, block, bits, stochastic, key, first);                            \
    else if (left) encode_block(x, 0, out, left, block, bits, stochastic, key, first);                            \
    else encode_block(x, e, out, 0, block, bits, stochastic, key, first);                                         \
  }

ENCODER(int8_of_128, 128, 8, 0)
ENCODER(int8_of_256, 256, 8, 0)
ENCODER(int8_of_512, 512, 8, 0)
ENCODER(int4_of_128, 128, 4, 0)
ENCODER(int4_of_256, 256, 4, 0)
ENCODER(int8_of_any, any, 8, 0)
ENCODER(int4_of_any, any, 4, 0)
ENCODER(int8_by_chance, any, 8, 1)
ENCODER(int4_by_chance, any, 4, 1)

static encoder *encoder_of(int64_t block, int bits, int stochastic) {
  if (stochastic) return bits == 8 ? int8_by_chance : int4_by_chance;
  if (bits == 8) return block == 128 ? int8_of_128 : block == 256 ? int8_of_256 : block == 512 ? int8_of_512 : int8_of_any;
  return block == 128 ? int4_of_128 : block == 256 ? int4_of_256 : int4_of_any;
}

/* x + e (e may be NULL) -> codes of all rows; `left` (may be NULL, x or e): what the codes leave over */
void mycel_encode(const float *x, const float *e, uint8_t *out, float *left, int64_t n, int64_t rows, int64_t row,
                  int64_t block, int bits, int stochastic, uint32_t key) {
  int64_t blocks = (row + block - 1) / block, size = 4 + (bits == 8 ? block : block / 2);
  encoder *encode = encoder_of(block, bits, stochastic);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < blocks; b++, out += size) {
      int64_t at = r * row + b * block, end = (r + 1) * row < n ? (r + 1) * row : n;
      uint32_t first = (uint32_t)((r * blocks + b) * block);
      if (at + block <= end) {
        encode(x + at, e ? e + at : 0, out, left ? left + at : 0, block, key, first);
        continue;
      }
      float all_x[MOST], all_e[MOST], all_left[MOST];
      size_t filled = at < end ? 4 * (size_t)(end - at) : 0;
      memset(all_x, 0, 4 * (size_t)block);
      memset(all_e, 0, 4 * (size_t)block);
      if (filled) memcpy(all_x, x + at, filled);
      if (filled && e) memcpy(all_e, e + at, filled);
      encode(all_x, e ? all_e : 0, out, left ? all_left : 0, block, key, first);
      if (filled && left) memcpy(left + at, all_left, filled);
    }
}

/* codes of `count` elements -> y, or added to it */
INLINE void decode_block(const int8_t *restrict q, float scale, float *restrict y, int64_t count, int add) {
  for (int64_t i = 0; i < count; i++) y[i] = add ? y[i] + (float)q[i] * scale : (float)q[i] * scale;
}

/* codes of all rows -> out[n]: the rows one behind the other, or with `sum` added up in their order (n <= row) */
void mycel_decode(const uint8_t *in, float *out, int64_t n, int64_t rows, int64_t row, int64_t block, int bits,
                  int sum) {
  int64_t blocks = (row + block - 1) / block, size = 4 + (bits == 8 ? block : block / 2), half = block / 2;
  int8_t codes[MOST];
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t r = 0; r < rows; r++) {
      const uint8_t *block_in = in + (r * blocks + b) * size;
      int64_t start = sum ? 0 : r * row, at = start + b * block, end = start + row < n ? start + row : n;
      int64_t count = at >= end ? 0 : end - at < block ? end - at : block;
      const int8_t *q = (const int8_t *)block_in + 4;
      float scale;
      memcpy(&scale, block_in, 4);
      if (bits == 4) {
        for (int64_t j = 0; j < half; j++) {
          codes[j] = (int8_t)((block_in[4 + j] & 15) - 8);
          codes[j + half] = (int8_t)((block_in[4 + j] >> 4) - 8);
        }
        q = codes;
      }
      if (sum && r) decode_block(q, scale, out + at, count, 1);
      else decode_block(q, scale, out + at, count, 0);
    }
}
