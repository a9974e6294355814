/* int8 and int4 in blocks, on the CPU: encode with what is left over in one pass, decode and add in one pass.

   A row of `row` floats is ceil(row / block) blocks, the last one filled up with zeros; of n floats the rows are cut
   one behind the other.  A block is its scale (a float), then its codes: int8 one a byte, int4 element i in the low
   and element i + block / 2 in the high half of byte i, plus 8.  Bits are those of the torch kernels (codec_kernels.py):
   compile with -ffp-contract=off. */

#include <stdint.h>
#include <string.h>

#define MOST 4096 /* floats in the largest block */

static inline float of_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }

static inline float unit(uint32_t key, uint32_t i) {
  uint32_t h = i * 0x9E3779B1u ^ key;
  h ^= h >> 16; h *= 0x85EBCA6Bu;
  h ^= h >> 13; h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return (float)(h >> 8) * 0x1p-24f;
}

/* v -> codes and their scale, given the bits of the largest |v|; `left` (may be NULL): v without what the codes say */
static void encode_block(const float *restrict v, int8_t *restrict q, float *restrict left, float *scale_out,
                         int32_t top_bits, int64_t block, float levels, int stochastic, uint32_t key, uint32_t first) {
  float top = of_bits((uint32_t)top_bits), scale = 0.0f, inverse = 0.0f;
  int finite = top_bits < 0x7F800000;
  if (finite && top >= 1e-35f) { scale = top / levels; inverse = levels / top; }
  if (!finite) { /* NaN for the whole block */
    scale = of_bits(0x7FC00000u);
    memset(q, 0, (size_t)block);
    for (int64_t i = 0; left && i < block; i++) left[i] = scale;
  } else if (stochastic)
    for (int64_t i = 0; i < block; i++) {
      float y = __builtin_floorf(v[i] * inverse + unit(key, first + (uint32_t)i));
      y = y > levels ? levels : y < -levels ? -levels : y;
      q[i] = (int8_t)(int32_t)y;
      if (left) left[i] = v[i] - y * scale;
    }
  else if (left)
    for (int64_t i = 0; i < block; i++) {
      float y = __builtin_rintf(v[i] * inverse);
      q[i] = (int8_t)(int32_t)y;
      left[i] = v[i] - y * scale;
    }
  else
    for (int64_t i = 0; i < block; i++) q[i] = (int8_t)(int32_t)__builtin_rintf(v[i] * inverse);
  *scale_out = scale;
}

/* v[i] = x[i] + e[i] (e may be NULL: v is x) -> the bits of the largest |v|: as integers NaN is above infinity, and
   infinity above all numbers */
static int32_t largest(const float *restrict x, const float *restrict e, float *restrict v, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; i++) {
    float sum = e ? x[i] + e[i] : x[i];
    if (e) v[i] = sum;
    int32_t b;
    memcpy(&b, &sum, 4);
    b &= 0x7FFFFFFF;
    top = b > top ? b : top;
  }
  return top;
}

/* x + e (e may be NULL) -> codes of all rows; `left` (may be NULL): what the codes leave over */
void mycel_encode(const float *x, const float *e, uint8_t *out, float *left, int64_t n, int64_t rows, int64_t row,
                  int64_t block, int bits, int stochastic, uint32_t key) {
  int64_t blocks = (row + block - 1) / block, bytes = 4 + (bits == 8 ? block : block / 2), half = block / 2;
  float levels = bits == 8 ? 127.0f : 7.0f;
  float v[MOST], spare[MOST];
  int8_t codes[MOST];
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < blocks; b++, out += bytes) {
      int64_t at = r * row + b * block, end = (r + 1) * row < n ? (r + 1) * row : n;
      int64_t count = at >= end ? 0 : end - at < block ? end - at : block;
      int32_t top = e ? largest(x + at, e + at, v, count) : largest(x + at, 0, 0, count);
      if (!e && count < block) memcpy(v, x + at, 4 * (size_t)count);
      if (count < block) memset(v + count, 0, 4 * (size_t)(block - count));
      float scale;
      float *rest = !left ? 0 : count < block ? spare : left + at;
      int8_t *q = bits == 8 ? (int8_t *)out + 4 : codes;
      encode_block(e || count < block ? v : x + at, q, rest, &scale, top, block, levels, stochastic, key,
                   (uint32_t)((r * blocks + b) * block));
      memcpy(out, &scale, 4);
      if (bits == 4)
        for (int64_t i = 0; i < half; i++) out[4 + i] = (uint8_t)((codes[i] + 8) | ((codes[i + half] + 8) << 4));
      if (rest == spare) memcpy(left + at, spare, 4 * (size_t)count);
    }
}

/* codes of all rows -> out[n]: the rows one behind the other, or with `sum` added up in their order (n <= row) */
void mycel_decode(const uint8_t *in, float *out, int64_t n, int64_t rows, int64_t row, int64_t block, int bits,
                  int sum) {
  int64_t blocks = (row + block - 1) / block, bytes = 4 + (bits == 8 ? block : block / 2), half = block / 2;
  int8_t codes[MOST];
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t r = 0; r < rows; r++) {
      const uint8_t *block_in = in + (r * blocks + b) * bytes;
      int64_t start = sum ? 0 : r * row, at = start + b * block, end = start + row < n ? start + row : n;
      int64_t count = at >= end ? 0 : end - at < block ? end - at : block;
      const int8_t *q = (const int8_t *)block_in + 4;
      float scale, *y = out + at;
      memcpy(&scale, block_in, 4);
      if (bits == 4) {
        for (int64_t i = 0; i < half; i++) {
          codes[i] = (int8_t)((block_in[4 + i] & 15) - 8);
          codes[i + half] = (int8_t)((block_in[4 + i] >> 4) - 8);
        }
        q = codes;
      }
      if (sum && r)
        for (int64_t i = 0; i < count; i++) y[i] += (float)q[i] * scale;
      else
        for (int64_t i = 0; i < count; i++) y[i] = (float)q[i] * scale;
    }
}
