/* Numbers as C code of ours has them: halves (the upper halves of floats: bfloat16), and e^x. */

static inline float of_half(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline uint16_t half_of(float f) { /* to the nearest, ties to even */
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

static inline int32_t bits_of(float f) { int32_t i; memcpy(&i, &f, 4); return i; }
static inline float of_bits(int32_t i) { float f; memcpy(&f, &i, 4); return f; }

/* e^x by instructions that a compiler does for many x at once: 2^n e^rest, to a unit in the last place; 2^n is two
   factors, as it may be smaller than a float of full precision */
static inline float exp_of(float x) {
  float turns = x * 1.44269504f + 12582912.0f; /* n, in the last bits of a large number */
  int32_t n = bits_of(turns) - 0x4B400000;
  float rest = turns - 12582912.0f;
  rest = x - rest * 0.693359375f + rest * 2.12194440e-4f; /* ln 2 in two parts */
  float e = 1.9875691500e-4f;
  e = e * rest + 1.3981999507e-3f;
  e = e * rest + 8.3334519073e-3f;
  e = e * rest + 4.1665795894e-2f;
  e = e * rest + 1.6666665459e-1f;
  e = e * rest + 5.0000001201e-1f;
  e = e * rest * rest + rest + 1.0f;
  uint32_t first = (uint32_t)((n >> 1) + 127), second = (uint32_t)(n - (n >> 1) + 127);
  e = e * of_bits((int32_t)(first << 23)) * of_bits((int32_t)(second << 23));
  e = x < -104.0f ? 0.0f : e;
  return x > 88.8f ? INFINITY : e;
}
