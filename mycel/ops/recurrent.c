/* What a step of an LSTM or a GRU does between its products, forward and back: one pass over its rows.

   Matrices are of floats, row by row; gates stand side by side in a row: [rows, 4 n] of an LSTM (input, forget, cell,
   output), [rows, 3 n] of a GRU (reset, update, new). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ENOUGH 16384 /* elements of a state from which on threads share the rows */
#define EACH_ROW _Pragma("omp parallel for if (rows * n >= ENOUGH)") for (int64_t r = 0; r < rows; r++)
#define IN const float *restrict
#define OUT float *restrict

static inline float power_of_two(float shifted) { /* 2^k of k + 1.5 * 2^23 */
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4B400000u + 127u) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return power;
}

/* Within two units in the last place; infinite beyond what a float holds, never below the smallest normal one. */
static inline float exp_of(float given) {
  float x = given > 88.0f ? 88.0f : given;
  x = x < -87.0f ? -87.0f : x;
  float shifted = x * 1.44269504088896341f + 12582912.0f, k = shifted - 12582912.0f;
  float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float power = (p * r * r + r + 1.0f) * power_of_two(shifted);
  return given > 88.0f ? INFINITY : power;
}

static inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

static inline float tanh_of(float x) {
  float s = x * x;
  float near = -5.70498872745e-3f;
  near = near * s + 2.06390887954e-2f;
  near = near * s - 5.37397155531e-2f;
  near = near * s + 1.33314422036e-1f;
  near = near * s - 3.33332819422e-1f;
  near = near * s * x + x;
  float far = 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f);
  return fabsf(x) < 0.625f ? near : far;
}

/* Rows: each part of a matrix is a pointer of its own, so that the compiler knows them to lie apart. */

static void lstm_row(OUT in, OUT forget, OUT cell, OUT out, IN c_before, OUT c, OUT y, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    in[j] = sigmoid_of(in[j]);
    forget[j] = sigmoid_of(forget[j]);
    cell[j] = tanh_of(cell[j]);
    out[j] = sigmoid_of(out[j]);
    c[j] = forget[j] * c_before[j] + in[j] * cell[j];
    y[j] = out[j] * tanh_of(c[j]);
  }
}

static void lstm_row_back(IN in, IN forget, IN cell, IN out, IN c_before, IN c, IN gy, IN gc, IN dh, OUT dc, OUT d_in,
                          OUT d_forget, OUT d_cell, OUT d_out, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    float turned = tanh_of(c[j]), by_h = dh[j] + gy[j];
    float by_c = dc[j] + gc[j] + by_h * out[j] * (1.0f - turned * turned);
    d_in[j] = by_c * cell[j] * in[j] * (1.0f - in[j]);
    d_forget[j] = by_c * c_before[j] * forget[j] * (1.0f - forget[j]);
    d_cell[j] = by_c * in[j] * (1.0f - cell[j] * cell[j]);
    d_out[j] = by_h * turned * out[j] * (1.0f - out[j]);
    dc[j] = by_c * forget[j];
  }
}

static void gru_row(IN x, IN inside, IN h, OUT reset, OUT update, OUT new, OUT candidate, OUT y, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    candidate[j] = inside[2 * n + j];
    reset[j] = sigmoid_of(x[j] + inside[j]);
    update[j] = sigmoid_of(x[n + j] + inside[n + j]);
    new[j] = tanh_of(x[2 * n + j] + reset[j] * candidate[j]);
    y[j] = new[j] + update[j] * (h[j] - new[j]);
  }
}

static void gru_row_back(IN reset, IN update, IN new, IN candidate, IN h, IN gy, OUT dh, OUT outside_reset,
                         OUT outside_update, OUT outside_new, OUT inside_reset, OUT inside_update, OUT inside_new,
                         int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    float by_h = dh[j] + gy[j], by_new = by_h * (1.0f - update[j]) * (1.0f - new[j] * new[j]);
    outside_reset[j] = inside_reset[j] = by_new * candidate[j] * reset[j] * (1.0f - reset[j]);
    outside_update[j] = inside_update[j] = by_h * (h[j] - new[j]) * update[j] * (1.0f - update[j]);
    outside_new[j] = by_new;
    inside_new[j] = by_new * reset[j];
    dh[j] = by_h * update[j];
  }
}

/* z: what comes to the gates, then the gates. */
void mycel_lstm_step(float *z, const float *c_before, float *c, float *y, int64_t rows, int64_t n) {
  EACH_ROW {
    float *at = z + r * 4 * n;
    lstm_row(at, at + n, at + 2 * n, at + 3 * n, c_before + r * n, c + r * n, y + r * n, n);
  }
}

/* dh: the cotangent of the hidden state from the steps behind; dc: that of the cell, which is passed on; dz: of what
   came to the gates. */
void mycel_lstm_step_back(const float *gates, const float *c_before, const float *c, const float *gy, const float *gc,
                          const float *dh, float *dc, float *dz, int64_t rows, int64_t n) {
  EACH_ROW {
    const float *at = gates + r * 4 * n;
    float *to = dz + r * 4 * n;
    lstm_row_back(at, at + n, at + 2 * n, at + 3 * n, c_before + r * n, c + r * n, gy + r * n, gc + r * n, dh + r * n,
                  dc + r * n, to, to + n, to + 2 * n, to + 3 * n, n);
  }
}

/* x: what comes to the gates from outside; inside: from the hidden state. */
void mycel_gru_step(const float *x, const float *inside, const float *h, float *gates, float *candidate, float *y,
                    int64_t rows, int64_t n) {
  EACH_ROW {
    float *to = gates + r * 3 * n;
    gru_row(x + r * 3 * n, inside + r * 3 * n, h + r * n, to, to + n, to + 2 * n, candidate + r * n, y + r * n, n);
  }
}

/* dh: the cotangent of the state, then what goes past the product; outside, inside: of what came to the gates. */
void mycel_gru_step_back(const float *gates, const float *candidate, const float *h, const float *gy, float *dh,
                         float *outside, float *inside, int64_t rows, int64_t n) {
  EACH_ROW {
    const float *at = gates + r * 3 * n;
    float *out = outside + r * 3 * n, *in = inside + r * 3 * n;
    gru_row_back(at, at + n, at + 2 * n, candidate + r * n, h + r * n, gy + r * n, dh + r * n, out, out + n,
                 out + 2 * n, in, in + n, in + 2 * n, n);
  }
}
