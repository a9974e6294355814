/* int8 and int4 in blocks, on the CPU: encode with what is left over in one pass, decode and add in one pass.

   A row of `row` floats is ceil(row / block) blocks, the last one filled up with zeros; of n floats the rows are cut
   one behind the other.  A block is its scale (a float), then its codes: int8 one a byte, int4 element i in the low
   and element i + block / 2 in the high half of byte i, plus 8.  Bits are those of the torch kernels
   (codec_kernels.py): compile with -ffp-contract=off.

   A block is read once, and lies in the nearest cache until it is written.  Loops are such as compilers make vectors of
   for any processor. */

#include <stdint.h>
#include <string.h>

#define MOST 4096 /* floats in the largest block */
#define LINE 16   /* floats in a line of a cache */
#define AHEAD 512 /* floats that are fetched before they are needed */
#define INLINE static inline __attribute__((always_inline))

INLINE float of_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
INLINE int32_t bits_of(float f) { int32_t b; memcpy(&b, &f, 4); return b; }

/* [0, 1) for the element `i`: murmur3's end */
INLINE float unit(uint32_t key, uint32_t i) {
  uint32_t h = (i * 0x9E3779B1u) ^ key;
  h ^= h >> 16; h *= 0x85EBCA6Bu;
  h ^= h >> 13; h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return (float)(int32_t)(h >> 8) * 0x1p-24f;
}

/* |y| < 2^22 to the nearest whole number, halves to even: added to this, a float has no bits behind the point */
#define NEAREST 0x1.8p23f

/* y as a whole number, added to NEAREST */
INLINE float rounded(float y, float levels, int stochastic, uint32_t key, uint32_t i) {
  if (!stochastic) return y + NEAREST;
  y += unit(key, i);
  float whole = (float)(int32_t)y;
  whole = whole > y ? whole - 1.0f : whole; /* that was rounded up: towards zero */
  whole = whole > levels ? levels : whole;
  return (whole < -levels ? -levels : whole) + NEAREST;
}

/* codes of a block's values; `left` (may be NULL): what they leave over */
INLINE void write_codes(const float *restrict v, int8_t *restrict codes, float *restrict left, int64_t block,
                        float scale, float inverse, float levels, int stochastic, uint32_t key, uint32_t first) {
  for (int64_t i = 0; i < block; i++) {
    float shifted = rounded(v[i] * inverse, levels, stochastic, key, first + (uint32_t)i);
    codes[i] = (int8_t)bits_of(shifted); /* the last byte of NEAREST is zero */
    if (left) left[i] = v[i] - (shifted - NEAREST) * scale;
  }
}

/* Next blocks come nearer while this one is written.  Only x86 asks for it: on ARM (Neoverse) it takes a third away. */
INLINE void fetch(const float *x, const float *e, const float *left, int64_t block) {
#ifdef __x86_64__
  for (int64_t i = 0; i < block; i += LINE) {
    __builtin_prefetch(x + i + AHEAD);
    if (e) __builtin_prefetch(e + i + AHEAD);
    if (left) __builtin_prefetch(left + i + AHEAD, 1);
  }
#else
  (void)x, (void)e, (void)left, (void)block;
#endif
}

/* One whole block, x + e (e may be NULL) -> its scale and codes; `left` (may be NULL, x or e): what the codes leave
   over.  All but the pointers and the place is known where this is called, so that no choice is left in the loops. */
INLINE void encode_block(const float *x, const float *e, uint8_t *out, float *left, int64_t block, int bits,
                         int stochastic, uint32_t key, uint32_t first) {
  float v[MOST];
  fetch(x, e, left, block);
  int32_t top = 0; /* of the bits of |v|: as integers NaN is above infinity, and infinity above all numbers */
  for (int64_t i = 0; i < block; i++) {
    v[i] = e ? x[i] + e[i] : x[i];
    int32_t size = bits_of(__builtin_fabsf(v[i]));
    top = size > top ? size : top;
  }
  float levels = bits == 8 ? 127.0f : 7.0f, largest = of_bits((uint32_t)top), scale = 0.0f, inverse = 0.0f;
  if (top >= 0x7F800000) { /* NaN for the whole block */
    scale = of_bits(0x7FC00000u);
    memcpy(out, &scale, 4);
    memset(out + 4, bits == 8 ? 0 : 0x88, (size_t)(bits == 8 ? block : block / 2));
    for (int64_t i = 0; left && i < block; i++) left[i] = scale;
    return;
  }
  if (largest >= 1e-35f) { scale = largest / levels; inverse = levels / largest; }
  memcpy(out, &scale, 4);
  if (bits == 8) {
    write_codes(v, (int8_t *)out + 4, left, block, scale, inverse, levels, stochastic, key, first);
    return;
  }
  int8_t codes[MOST];
  write_codes(v, codes, left, block, scale, inverse, levels, stochastic, key, first);
  int64_t half = block / 2;
  for (int64_t i = 0; i < half; i++)
    out[4 + i] = (uint8_t)((uint8_t)(codes[i] + 8) | (uint8_t)(codes[i + half] + 8) << 4);
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
  if (bits == 4) return block == 128 ? int4_of_128 : block == 256 ? int4_of_256 : int4_of_any;
  return block == 128 ? int8_of_128 : block == 256 ? int8_of_256 : block == 512 ? int8_of_512 : int8_of_any;
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
