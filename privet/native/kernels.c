/* Loops that read memory once where PyTorch's operations, one after another, read and write it several times.

   Every function works on contiguous float32 unless it says otherwise, takes sizes that its caller has checked, and is
   called through ctypes, without the interpreter's lock. OpenMP is the one that PyTorch has loaded already, so both
   share their threads. target_clones builds each loop for several kinds of processor; the right one is chosen when the
   library is loaded. */

#include <Python.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

const int64_t privet_version = 10; /* of what the functions take; the same number is in __init__.py */

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define SEVERAL_KINDS /* of processors of one architecture */
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* Ternary gradients: t(v) = 1 where v > tau, -1 where v < -tau, 0 elsewhere.

   A record is clipped by the count of its entries and its entries are added later, by other threads: both must see the
   same. Whether very small numbers count as zero is a setting of each thread (torch.set_flush_denormal changes the
   caller's alone), so it is put to its default in all of them. A number that is not finite spoils the count of its
   record: 0·v is NaN for it, and 0 for every other. */

FAST static double count_large(float scale, const float *restrict x, int64_t size, float tau)
{
    int32_t found = 0;
    float spoiled = 0;
#pragma omp simd reduction(+ : found, spoiled)
    for (int64_t i = 0; i < size; i++) {
        const float v = scale * x[i];
        found += (v > tau) | (v < -tau);
        spoiled += 0.0f * v;
    }
    return (double)found + (double)spoiled;
}

FAST static void add_signs(float scale, const float *restrict x, int64_t size, float tau, float weight,
                           float *restrict total)
{
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        const float v = scale * x[i];
        total[i] += (v > tau ? weight : 0.0f) - (v < -tau ? weight : 0.0f);
    }
}

#define WIDTH 2048 /* so many columns at a time: what is added to stays in the cache */

/* counts[n] += how many entries of the matrix delta[n] x[n]ᵀ have t ≠ 0; rows × columns of them. */
void privet_ternary_counts(const float *delta, const float *x, int64_t records, int64_t rows, int64_t columns,
                           float tau, double *counts)
{
#pragma omp parallel
    {
        fenv_t before;
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < records; n++)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t first = 0; first < columns; first += WIDTH)
                    counts[n] += count_large(delta[n * rows + row], x + n * columns + first,
                                             columns - first < WIDTH ? columns - first : WIDTH, tau);
        fesetenv(&before);
    }
}

/* total += Σ_n weights[n]·t(delta[n] x[n]ᵀ), leaving out records of weight 0. */
void privet_ternary_sum(const float *delta, const float *x, const float *weights, int64_t records, int64_t rows,
                        int64_t columns, float tau, float *total)
{
    const int64_t parts = (columns + WIDTH - 1) / WIDTH;
#pragma omp parallel
    {
        fenv_t before;
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t part = 0; part < parts; part++) {
                const int64_t first = part * WIDTH, size = columns - first < WIDTH ? columns - first : WIDTH;
                for (int64_t n = 0; n < records; n++)
                    if (weights[n] != 0)
                        add_signs(delta[n * rows + row], x + n * columns + first, size, tau, weights[n],
                                  total + row * columns + first);
            }
        fesetenv(&before);
    }
}

/* Weight gradients of a two-dimensional convolution, record by record. */

typedef struct {
    int64_t records, channels, height, width;              /* of the input */
    int64_t x_record, x_channel, x_row, x_column;          /* its strides */
    int64_t out_channels, out_height, out_width;           /* of the gradient at the output */
    int64_t d_record, d_channel, d_row, d_column;          /* its strides */
    int64_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x;
    int64_t top, left, padded_height, padded_width;        /* zeros around the input */
} convolution;

/* Vectors of fixed size: AVX2's, and AVX-512's for the one loop that adds up in all of its registers. GCC keeps those
   that are too wide for a processor in memory, many times slower. */
#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));
#define WIDE 16
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4)));

/* sums[t] = Σ over output positions of x[t]·delta, for `count` neighbours in memory and `kept` of WIDE out channels,
   which are one vector or two. */
#define EACH_TAP _Pragma("GCC unroll 16") for (int t = 0; t < taps; t++)
#define EACH_PART _Pragma("GCC unroll 2") for (int k = 0; k < parts; k++)
#define SUM_TAPS(vector, count)                                                                                        \
    for (; tap + (count) <= run; tap += (count), x += (count), out += (count) * c->out_channels) {                     \
        enum { taps = count, parts = sizeof(wide) / sizeof(vector) };                                                  \
        vector sums[taps][parts];                                                                                      \
        EACH_TAP EACH_PART sums[t][k] = (vector){0};                                                                   \
        for (int64_t y = 0; y < c->out_height; y++) {                                                                  \
            const float *restrict at = x + y * row_step;                                                               \
            for (int64_t z = 0; z < c->out_width; z++, at += column_step) {                                            \
                const vector *from = (const vector *)(delta + (y * c->out_width + z) * depth);                         \
                vector d[parts];                                                                                       \
                EACH_PART d[k] = from[k];                                                                              \
                EACH_TAP EACH_PART sums[t][k] += at[t] * d[k];                                                         \
            }                                                                                                          \
        }                                                                                                              \
        if (kept == WIDE)                                                                                              \
            EACH_TAP EACH_PART ((vector *)(out + t * c->out_channels))[k] = sums[t][k];                                \
        else                                                                                                           \
            EACH_TAP memcpy(out + t * c->out_channels, sums[t], sizeof(float) * (size_t)kept);                         \
    }

/* `run` taps that lie beside each other in the frame, times up to WIDE output channels. As many taps at a time as have
   their sums in registers. */
typedef void sum_of_run(const convolution *c, const float *restrict x, const float *restrict delta, int64_t depth,
                        int64_t run, int64_t kept, float *restrict out);

FAST static void sum_run(const convolution *c, const float *restrict x, const float *restrict delta, int64_t depth,
                         int64_t run, int64_t kept, float *restrict out)
{
    const int64_t column_step = c->stride_x * c->channels, row_step = c->stride_y * c->padded_width * c->channels;
    int64_t tap = 0;
    SUM_TAPS(lanes, 4)
    SUM_TAPS(lanes, 1)
}

#ifdef SEVERAL_KINDS
__attribute__((target("arch=x86-64-v4"))) static void sum_run_wide(const convolution *c, const float *restrict x,
                                                                   const float *restrict delta, int64_t depth,
                                                                   int64_t run, int64_t kept, float *restrict out)
{
    const int64_t column_step = c->stride_x * c->channels, row_step = c->stride_y * c->padded_width * c->channels;
    int64_t tap = 0;
    SUM_TAPS(wide, 16)
    SUM_TAPS(wide, 8)
    SUM_TAPS(wide, 4)
    SUM_TAPS(wide, 1)
}

static sum_of_run *fastest_sum(void) { return __builtin_cpu_supports("x86-64-v4") ? sum_run_wide : sum_run; }
#else
static sum_of_run *fastest_sum(void) { return sum_run; }
#endif

FAST static double sum_of_squares(const float *restrict x, int64_t size)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* sums = Σ of rows, of which `kept` of `depth` numbers count; `part` is room for as many. Few at a time: sums of many
   float32 would lose digits. */
FAST static void add_rows(const float *restrict x, int64_t rows, int64_t depth, int64_t kept, float *restrict part,
                          float *restrict sums)
{
    memset(sums, 0, sizeof(float) * (size_t)kept);
    for (int64_t first = 0; first < rows; first += 256) {
        memset(part, 0, sizeof(float) * (size_t)kept);
        for (int64_t row = first; row < rows && row < first + 256; row++)
#pragma omp simd
            for (int64_t i = 0; i < kept; i++) part[i] += x[row * depth + i];
        for (int64_t i = 0; i < kept; i++) sums[i] += part[i];
    }
}

/* rows[n] = the gradient of record n, as (kernel height, kernel width, channels, out channels), and its squared norm;
   sums[n] = delta[n], added up over positions. 0, or 1 if there was no memory. */
int privet_convolution_gradients(const convolution *c, const float *x, const float *delta, float *rows, double *squares,
                                 float *sums)
{
    const int64_t depth = (c->out_channels + WIDE - 1) / WIDE * WIDE;
    const int64_t frame_size = c->padded_height * c->padded_width * c->channels;
    const int64_t delta_size = c->out_height * c->out_width * depth;
    const int64_t taps = c->kernel_height * c->kernel_width * c->channels, size = taps * c->out_channels;
    const int together = c->dilation_x == 1; /* then a row of the kernel lies in one piece of memory */
    const int64_t run = together ? c->kernel_width * c->channels : c->channels;
    const int64_t pieces = together ? 1 : c->kernel_width;
    sum_of_run *const sum = fastest_sum();
    int failed = 0;
#pragma omp parallel
    {
        float *frame = calloc((size_t)(frame_size + delta_size + depth), sizeof(float));
        if (!frame) {
#pragma omp atomic write
            failed = 1;
        }
        float *flat = frame + frame_size, *part = flat + delta_size;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c->records; n++) {
            if (!frame) continue;
            for (int64_t row = 0; row < c->height; row++) {
                const float *from = x + n * c->x_record + row * c->x_row;
                float *to = frame + ((row + c->top) * c->padded_width + c->left) * c->channels;
                if (c->x_channel == 1 && c->x_column == c->channels)
                    memcpy(to, from, sizeof(float) * (size_t)(c->width * c->channels));
                else
                    for (int64_t column = 0; column < c->width; column++)
                        for (int64_t channel = 0; channel < c->channels; channel++)
                            *to++ = from[column * c->x_column + channel * c->x_channel];
            }
            for (int64_t row = 0; row < c->out_height; row++)
                for (int64_t column = 0; column < c->out_width; column++) {
                    const float *from = delta + n * c->d_record + row * c->d_row + column * c->d_column;
                    float *to = flat + (row * c->out_width + column) * depth;
                    if (c->d_channel == 1)
                        memcpy(to, from, sizeof(float) * (size_t)c->out_channels);
                    else
                        for (int64_t channel = 0; channel < c->out_channels; channel++)
                            to[channel] = from[channel * c->d_channel];
                }
            float *out = rows + n * size;
            for (int64_t first = 0; first < c->out_channels; first += WIDE) {
                const int64_t left = c->out_channels - first, kept = left < WIDE ? left : WIDE;
                for (int64_t row = 0; row < c->kernel_height; row++)
                    for (int64_t piece = 0; piece < pieces; piece++)
                        sum(c, frame + (row * c->dilation_y * c->padded_width + piece * c->dilation_x) * c->channels,
                            flat + first, depth, run, kept,
                            out + (row * c->kernel_width + piece) * c->channels * c->out_channels + first);
            }
            squares[n] = sum_of_squares(out, size);
            add_rows(flat, c->out_height * c->out_width, depth, c->out_channels, part, sums + n * c->out_channels);
        }
        free(frame);
    }
    return failed;
}

/* What a two-dimensional convolution with a stride passes on to its input.

   Output position o meets input position o·stride + tap, both counted with the padding. So inputs whose position has the
   same remainder by the stride meet the same taps, and `count` neighbours among them, q to q + count, meet them at
   neighbouring outputs: their sums stay in registers, over the taps and the output channels, for WIDE channels. */
#define EACH_INPUT _Pragma("GCC unroll 8") for (int p = 0; p < inputs; p++)
#define SUM_OUTPUTS(vector, count)                                                                                     \
    for (; q + (count) <= last; q += (count)) {                                                                        \
        enum { inputs = count, parts = sizeof(wide) / sizeof(vector) };                                                \
        vector sums[inputs][parts];                                                                                    \
        EACH_INPUT EACH_PART sums[p][k] = (vector){0};                                                                 \
        for (int64_t y = row->first; y <= row->last; y++)                                                              \
            for (int64_t t = 0; t < taps; t++) {                                                                       \
                const float *restrict d = delta + (y * row->frame_width + q + row->before - t) * outputs;              \
                const float *restrict w =                                                                              \
                    weight + ((row->tap - y * c->stride_y) * c->kernel_width + remainder + t * c->stride_x) *          \
                                 outputs * depth + channel;                                                            \
                for (int64_t o = 0; o < outputs; o++, w += depth)                                                      \
                    EACH_PART                                                                                          \
                    {                                                                                                  \
                        const vector v = ((const vector *)w)[k];                                                       \
                        EACH_INPUT sums[p][k] += d[p * outputs + o] * v;                                               \
                    }                                                                                                  \
            }                                                                                                          \
        EACH_INPUT                                                                                                     \
        {                                                                                                              \
            float *to = x + ((q + p) * c->stride_x + remainder - c->left) * c->channels + channel;                     \
            if (kept == WIDE)                                                                                          \
                EACH_PART ((vector *)to)[k] = sums[p][k];                                                              \
            else                                                                                                       \
                memcpy(to, sums[p], sizeof(float) * (size_t)kept);                                                     \
        }                                                                                                              \
    }
#define EACH_REMAINDER(...)                                                                                            \
    const int64_t outputs = c->out_channels, depth = (c->channels + WIDE - 1) / WIDE * WIDE;                           \
    for (int64_t remainder = 0; remainder < c->stride_x; remainder++) {                                                \
        const int64_t rest = c->kernel_width - remainder, framed = c->width + c->left - remainder;                     \
        const int64_t taps = rest > 0 ? (rest + c->stride_x - 1) / c->stride_x : 0;                                    \
        const int64_t start = remainder >= c->left ? 0 : (c->left - remainder + c->stride_x - 1) / c->stride_x;        \
        const int64_t last = framed > 0 ? (framed + c->stride_x - 1) / c->stride_x : 0;                                \
        for (int64_t channel = 0; channel < c->channels; channel += WIDE) {                                            \
            const int64_t left = c->channels - channel, kept = left < WIDE ? left : WIDE;                              \
            int64_t q = start;                                                                                         \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

typedef struct {
    int64_t tap;                 /* of the kernel's rows, that output row 0 would meet this input row with */
    int64_t first, last;         /* output rows that meet it */
    int64_t before, frame_width; /* zeros before each output row, and its width with them */
} input_row;

typedef void inputs_of_row(const convolution *c, const input_row *row, const float *restrict delta,
                           const float *restrict weight, float *restrict x);

FAST static void sum_inputs(const convolution *c, const input_row *row, const float *restrict delta,
                            const float *restrict weight, float *restrict x)
{
    EACH_REMAINDER(SUM_OUTPUTS(lanes, 4) SUM_OUTPUTS(lanes, 2) SUM_OUTPUTS(lanes, 1))
}

#ifdef SEVERAL_KINDS
__attribute__((target("arch=x86-64-v4"))) static void sum_inputs_wide(const convolution *c, const input_row *row,
                                                                      const float *restrict delta,
                                                                      const float *restrict weight, float *restrict x)
{
    EACH_REMAINDER(SUM_OUTPUTS(wide, 8) SUM_OUTPUTS(wide, 6) SUM_OUTPUTS(wide, 4) SUM_OUTPUTS(wide, 2)
                       SUM_OUTPUTS(wide, 1))
}

static inputs_of_row *fastest_inputs(void)
{
    return __builtin_cpu_supports("x86-64-v4") ? sum_inputs_wide : sum_inputs;
}
#else
static inputs_of_row *fastest_inputs(void) { return sum_inputs; }
#endif

/* x = the gradient at the input, both it and delta with channels last and nothing in between; without dilation. The
   weight comes as (kernel height, kernel width, out channels, channels and zeros up to a multiple of WIDE). 0, or 1 if
   there was no memory. */
int privet_convolution_inputs(const convolution *c, const float *delta, const float *weight, float *x)
{
    inputs_of_row *const sum = fastest_inputs();
    const int64_t before = (c->kernel_width - 1) / c->stride_x;
    const int64_t needed = (c->width + c->left + c->stride_x - 1) / c->stride_x;
    const int64_t frame_width = before + (needed > c->out_width ? needed : c->out_width);
    const size_t row_size = (size_t)(c->out_width * c->out_channels);
    int failed = 0;
#pragma omp parallel
    {
        float *frame = calloc((size_t)(c->out_height * frame_width * c->out_channels), sizeof(float));
        if (!frame) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c->records; n++) {
            if (!frame) continue;
            for (int64_t y = 0; y < c->out_height; y++)
                memcpy(frame + (y * frame_width + before) * c->out_channels,
                       delta + (n * c->out_height + y) * (int64_t)row_size, sizeof(float) * row_size);
            for (int64_t h = 0; h < c->height; h++) {
                const int64_t at = h + c->top, reach = at - c->kernel_height + c->stride_y;
                const int64_t first = reach > 0 ? reach / c->stride_y : 0, last = at / c->stride_y;
                const input_row row = {at, first, last < c->out_height ? last : c->out_height - 1, before, frame_width};
                sum(c, &row, frame, weight, x + (n * c->height + h) * c->width * c->channels);
            }
        }
        free(frame);
    }
    return failed;
}

/* Clips: a record is measured and scaled while it is in the cache.

   What scales a record of this squared length to `target`, and 0 for one whose squared length float32 cannot hold. */
static float factor_of(double square, double target)
{
    if (!(square <= FLT_MAX)) return 0;
    return square > target * target ? (float)(target / sqrt(square)) : 1.0f;
}

/* A record whose factor is 0 becomes 0, whatever is in it. */
FAST static void scale(const float *restrict x, int64_t size, float factor, float *restrict out)
{
    if (factor == 0)
        memset(out, 0, sizeof(float) * (size_t)size);
    else
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor;
}

#define RUN 1024 /* so many numbers are added up in float32 before float64 takes over */

FAST static double squared_length(const float *restrict x, int64_t size)
{
    double square = 0;
    for (int64_t first = 0; first < size; first += RUN) {
        const int64_t last = size - first < RUN ? size : first + RUN;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = first; i < last; i++) part += x[i] * x[i];
        square += part;
    }
    return square;
}

FAST static void add_scaled(const float *restrict x, int64_t size, float factor, double *restrict total)
{
#pragma omp simd
    for (int64_t i = 0; i < size; i++) total[i] += x[i] * factor;
}

/* Rows of `size` numbers, each at most `target` long: out[n] = x[n]·factors[n]·also[n], where `also` may be NULL.
   Without `out`, only the factors. With `total`, total += Σ_n x[n]·factors[n]. 0, or 1 if there was no memory. */
int privet_clip_rows(const float *x, int64_t records, int64_t size, double target, const float *also, float *out,
                     float *factors, double *total)
{
    int failed = 0;
#pragma omp parallel
    {
        double *part = total ? calloc((size_t)size, sizeof(double)) : NULL;
        if (total && !part) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < records; n++) {
            const float *row = x + n * size;
            factors[n] = factor_of(squared_length(row, size), target);
            if (out) scale(row, size, also ? factors[n] * also[n] : factors[n], out + n * size);
            if (part && factors[n] != 0) add_scaled(row, size, factors[n], part);
        }
        if (part)
#pragma omp critical
            for (int64_t i = 0; i < size; i++) total[i] += part[i];
        free(part);
    }
    return failed;
}

FAST static void scale_around(float *restrict y, int64_t size, float factor, const float *restrict center)
{
#pragma omp simd
    for (int64_t i = 0; i < size; i++) y[i] = factor * y[i] + (1 - factor) * center[i];
}

FAST static void scale_around_one(float *restrict y, int64_t size, float factor, float center)
{
    const float rest = (1 - factor) * center;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) y[i] = factor * y[i] + rest;
}

/* y[n] = bias + factors[n]·(y[n] - bias), the bias being one number for each channel; it may be NULL, for zeros. */
void privet_scale_outputs(float *y, int64_t records, int64_t channels, int64_t positions, int64_t channels_last,
                          const float *factors, const float *bias)
{
    const int64_t size = channels * positions;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < records; n++) {
        float *own = y + n * size;
        if (factors[n] == 1) continue;
        if (!bias)
            scale_around_one(own, size, factors[n], 0);
        else if (channels_last || positions == 1)
            for (int64_t p = 0; p < positions; p++) scale_around(own + p * channels, channels, factors[n], bias);
        else
            for (int64_t c = 0; c < channels; c++)
                scale_around_one(own + c * positions, positions, factors[n], bias[c]);
    }
}

FAST static void scale_and_add(const float *restrict x, int64_t size, float weight, float *restrict out,
                               double *restrict total)
{
#pragma omp simd
    for (int64_t i = 0; i < size; i++) total[i] += out[i] = x[i] * weight;
}

/* out[n] = weights[n]·x[n] for rows of `size` numbers, and total += Σ_n out[n]. 0, or 1 if there was no memory. */
int privet_weight_rows(const float *x, int64_t records, int64_t size, const float *weights, float *out, double *total)
{
    int failed = 0;
#pragma omp parallel
    {
        double *part = calloc((size_t)size, sizeof(double));
        if (!part) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < records; n++)
            if (part) scale_and_add(x + n * size, size, weights[n], out + n * size, part);
        if (part)
#pragma omp critical
            for (int64_t i = 0; i < size; i++) total[i] += part[i];
        free(part);
    }
    return failed;
}

typedef struct {
    int64_t records, channels, height, width, channels_last; /* of the input */
    int64_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left, out_height, out_width;
} window;

/* Squares at each position of one record, added up over its channels: energy[p·LANES]. `line` is room for a record. */
FAST static void add_channels(const window *w, const float *restrict x, float *restrict line, float *restrict energy)
{
    const int64_t positions = w->height * w->width, channels = w->channels;
    if (w->channels_last && channels > 1) {
        for (int64_t p = 0; p < positions; p++, x += channels) {
            lanes parts = {0};
            float sum = 0;
            int64_t c = 0;
            for (; c + LANES <= channels; c += LANES) parts += *(const lanes *)(x + c) * *(const lanes *)(x + c);
            for (; c < channels; c++) sum += x[c] * x[c];
            for (int i = 0; i < LANES; i++) sum += parts[i];
            line[p] = energy[p * LANES] = sum;
        }
        return;
    }
#pragma omp simd
    for (int64_t p = 0; p < positions; p++) line[p] = x[p] * x[p];
    for (int64_t c = 1; c < channels; c++)
#pragma omp simd
        for (int64_t p = 0; p < positions; p++) line[p] += x[c * positions + p] * x[c * positions + p];
    for (int64_t p = 0; p < positions; p++) energy[p * LANES] = line[p];
}

/* The first and the last tap that do not lie in the zeros around an axis; tap t is at start + t·step. */
static void taps_inside(int64_t start, int64_t step, int64_t taps, int64_t size, int64_t *first, int64_t *last)
{
    for (*first = 0; *first < taps && start + *first * step < 0; ++*first) continue;
    for (*last = taps - 1; *last >= 0 && start + *last * step >= size; --*last) continue;
}

/* For LANES records side by side: the largest sum of squares in one patch, or NaN where a number is not finite, be it
   in a patch or not. A patch is a box, so it is added up axis by axis. */
FAST static void largest_patches(const window *w, const lanes *restrict energy, lanes *restrict bands,
                                 float *restrict largest)
{
    lanes best = {0}, spoiled = {0};
    int64_t first, last;
    for (int64_t p = 0; p < w->height * w->width; p++) spoiled += 0.0f * energy[p];
    for (int64_t row = 0; row < w->out_height; row++) {
        const int64_t start = row * w->stride_y - w->top;
        taps_inside(start, w->dilation_y, w->kernel_height, w->height, &first, &last);
        for (int64_t i = 0; i < w->width; i++) {
            lanes sum = {0};
            for (int64_t tap = first; tap <= last; tap++) sum += energy[(start + tap * w->dilation_y) * w->width + i];
            bands[row * w->width + i] = sum;
        }
    }
    for (int64_t column = 0; column < w->out_width; column++) {
        const int64_t start = column * w->stride_x - w->left;
        taps_inside(start, w->dilation_x, w->kernel_width, w->width, &first, &last);
        for (int64_t row = 0; row < w->out_height; row++) {
            lanes sum = {0};
            for (int64_t tap = first; tap <= last; tap++) sum += bands[row * w->width + start + tap * w->dilation_x];
            const bits larger = sum > best;
            best = (lanes)(((bits)sum & larger) | ((bits)best & ~larger));
        }
    }
    *(lanes *)largest = best + spoiled;
}

/* All patches of one record together: squares at each position, times how many patches have that position. */
FAST static double all_patches(const float *restrict line, const float *restrict counts, int64_t positions)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < positions; p++) sum += (double)line[p] * (double)counts[p];
    return sum;
}

/* out[n] = x[n]·factors[n], so that no patch is longer than `target`, or, with `counts`, all of them together are not;
   without `out`, only the factors. 0, or 1 if there was no memory. */
int privet_clip_patches(const window *w, const float *x, double target, const float *counts, float *out, float *factors)
{
    const int64_t positions = w->height * w->width, size = w->channels * positions;
    int failed = 0;
#pragma omp parallel
    {
        lanes *energy = malloc(sizeof(lanes) * (size_t)(positions + w->out_height * w->width) +
                               sizeof(float) * (size_t)positions);
        if (!energy) {
#pragma omp atomic write
            failed = 1;
        }
        lanes *bands = energy + positions;
        float *line = (float *)(bands + w->out_height * w->width), largest[LANES];
        double together[LANES];
#pragma omp for schedule(static)
        for (int64_t first = 0; first < w->records; first += LANES) {
            if (!energy) continue;
            const int64_t count = w->records - first < LANES ? w->records - first : LANES;
            if (count < LANES) memset(energy, 0, sizeof(lanes) * (size_t)positions);
            for (int64_t i = 0; i < count; i++) {
                add_channels(w, x + (first + i) * size, line, (float *)energy + i);
                if (counts) together[i] = all_patches(line, counts, positions);
            }
            if (!counts) largest_patches(w, energy, bands, largest);
            for (int64_t i = 0; i < count; i++) {
                factors[first + i] = factor_of(counts ? together[i] : largest[i], target);
                if (out) scale(x + (first + i) * size, size, factors[first + i], out + (first + i) * size);
            }
        }
        free(energy);
    }
    return failed;
}

/* Σ_t |d_ct| and Σ_t d_ct of each channel of one record, in float64. */
FAST static void sum_positions(const float *restrict d, int64_t channels, int64_t positions, int channels_last,
                               double *restrict sizes, double *restrict sums)
{
    memset(sizes, 0, sizeof(double) * (size_t)channels);
    memset(sums, 0, sizeof(double) * (size_t)channels);
    for (int64_t first = 0; first < positions; first += RUN / 4) {
        const int64_t last = positions - first < RUN / 4 ? positions : first + RUN / 4;
        int64_t c = 0;
        if (channels_last)
            for (; c < channels; c += LANES) {
                const int64_t kept = channels - c < LANES ? channels - c : LANES;
                lanes size = {0}, sum = {0};
                if (kept == LANES)
                    for (int64_t p = first; p < last; p++) {
                        const lanes v = *(const lanes *)(d + p * channels + c);
                        size += (lanes)((bits)v & INT32_MAX); /* without its sign */
                        sum += v;
                    }
                else
                    for (int64_t p = first; p < last; p++)
                        for (int64_t i = 0; i < kept; i++) {
                            size[i] += fabsf(d[p * channels + c + i]);
                            sum[i] += d[p * channels + c + i];
                        }
                for (int64_t i = 0; i < kept; i++) {
                    sizes[c + i] += size[i];
                    sums[c + i] += sum[i];
                }
            }
        for (; c < channels; c++) {
            float size = 0, sum = 0;
#pragma omp simd reduction(+ : size, sum)
            for (int64_t p = first; p < last; p++) {
                size += fabsf(d[c * positions + p]);
                sum += d[c * positions + p];
            }
            sizes[c] += size;
            sums[c] += sum;
        }
    }
}

/* NaN if one of them is. */
static double larger_of(double a, double b) { return a > b || isnan(a) ? a : b; }

/* Kinds of norms: √Σ_c (Σ_t |d_ct|)²; ‖d‖; the larger of ‖d‖ and ‖Σ_t d_t‖. */
enum { L1_L2, FROBENIUS, WITH_BIAS };

/* Gradients at a convolution's output, each at most `target` long by its kind of norm:
   out[n] = d[n]·factors[n]·also[n], where `also` may be NULL, and sums[n] = factors[n]·Σ_t d[n]_t.
   0, or 1 if there was no memory. */
int privet_clip_gradients(const float *d, int64_t records, int64_t channels, int64_t positions, int64_t channels_last,
                          double target, int64_t kind, const float *also, float *out, float *factors, float *sums)
{
    const int64_t size = channels * positions;
    int failed = 0;
#pragma omp parallel
    {
        double *sizes = malloc(2 * sizeof(double) * (size_t)channels);
        if (!sizes) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < records; n++) {
            if (!sizes) continue;
            double *totals = sizes + channels, square = 0;
            sum_positions(d + n * size, channels, positions, (int)channels_last, sizes, totals);
            for (int64_t c = 0; c < channels; c++) square += kind == L1_L2 ? sizes[c] * sizes[c] : kind == WITH_BIAS ? totals[c] * totals[c] : 0;
            if (kind != L1_L2) square = larger_of(square, squared_length(d + n * size, size));
            const float factor = factors[n] = factor_of(square, target);
            for (int64_t c = 0; c < channels; c++)
                sums[n * channels + c] = factor == 0 ? 0 : (float)(factor * totals[c]);
            scale(d + n * size, size, also ? factor * also[n] : factor, out + n * size);
        }
        free(sizes);
    }
    return failed;
}

/* Normals from random words (Box-Muller), in float64 and without branches, so that several are made at a time. Errors
   of the polynomials are below 1e-15 of what they stand for. */

static inline double from_bits(uint64_t b) { double d; memcpy(&d, &b, sizeof d); return d; }
static inline uint64_t to_bits(double d) { uint64_t b; memcpy(&b, &d, sizeof b); return b; }

/* Whole numbers below 2^52 are the low bits of 2^52 + n. */
static inline double whole(uint64_t n) { return from_bits(UINT64_C(0x4330000000000000) | n) - 0x1p52; }

/* log(m·2^e) = e·log 2 + 2·artanh((m - 1)/(m + 1)), for normal positive numbers, with m within a factor √2 of 1. */
static inline double logarithm(double u)
{
    const uint64_t b = to_bits(u);
    double e = whole(b >> 52) - 1023, m = from_bits((b & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3ff0000000000000));
    const int halve = m > 1.4142135623730951;
    m = halve ? 0.5 * m : m;
    e = halve ? e + 1 : e;
    const double s = (m - 1) / (m + 1), q = s * s;
    double sum = 1.0 / 21;
    sum = sum * q + 1.0 / 19;
    sum = sum * q + 1.0 / 17;
    sum = sum * q + 1.0 / 15;
    sum = sum * q + 1.0 / 13;
    sum = sum * q + 1.0 / 11;
    sum = sum * q + 1.0 / 9;
    sum = sum * q + 1.0 / 7;
    sum = sum * q + 1.0 / 5;
    sum = sum * q + 1.0 / 3;
    return e * 0.693147180559945309417 + 2 * s * (sum * q + 1);
}

/* cos(πy) and sin(πy) for y in [-1, 1]: Taylor's series within an eighth of a turn, from the nearest quarter q. */
static inline void turn(double y, double *cosine, double *sine)
{
    const double q = (2 * y + 0x1.8p52) - 0x1.8p52; /* rounded to a whole number */
    const double t = 3.141592653589793238463 * (y - 0.5 * q), v = t * t;
    double c = 1 / 20922789888000.0, s = 1 / 355687428096000.0;
    c = c * v - 1 / 87178291200.0;
    c = c * v + 1 / 479001600.0;
    c = c * v - 1 / 3628800.0;
    c = c * v + 1 / 40320.0;
    c = c * v - 1 / 720.0;
    c = c * v + 1 / 24.0;
    c = c * v - 1 / 2.0;
    c = c * v + 1;
    s = s * v - 1 / 1307674368000.0;
    s = s * v + 1 / 6227020800.0;
    s = s * v - 1 / 39916800.0;
    s = s * v + 1 / 362880.0;
    s = s * v - 1 / 5040.0;
    s = s * v + 1 / 120.0;
    s = s * v - 1 / 6.0;
    s = (s * v + 1) * t;
    const double size = q < 0 ? -q : q;
    *cosine = size == 1 ? -q * s : (1 - size) * c;
    *sine = size == 1 ? q * c : (1 - size) * s;
}

/* `half` pairs: the radius from the first half of the words, from (0, 1] with 63 bits, the angle from the second. Gives
   whether one of the totals is not finite. */
FAST static int add_noise(const uint64_t *restrict words, int64_t first, int64_t last, int64_t half, double scale,
                          double inverse, double grid, const float *restrict total, float *restrict out)
{
    int lost = 0;
#pragma omp simd reduction(| : lost)
    for (int64_t i = first; i < last; i++) {
        const uint64_t a = words[i], b = words[half + i];
        const double u = (whole((a >> 32) & INT32_MAX) * 0x1p32 + whole(a & UINT32_MAX) + 1) * 0x1p-63;
        const double high = whole((b >> 32) ^ UINT64_C(0x80000000)) - 0x1p31; /* with its sign */
        const double y = (high * 0x1p32 + whole(b & UINT32_MAX)) * 0x1p-63;
        const double radius = scale * sqrt(-2 * logarithm(u));
        double cosine, sine;
        turn(y, &cosine, &sine);
        const double one = (double)total[i], other = (double)total[half + i];
        lost |= !(one >= -FLT_MAX && one <= FLT_MAX && other >= -FLT_MAX && other <= FLT_MAX);
        out[i] = (float)(rint(radius * cosine + inverse * one) * grid);
        out[half + i] = (float)(rint(radius * sine + inverse * other) * grid);
    }
    return lost;
}

/* out = total + scale·grid·N(0, 1) on multiples of `grid`, a power of two. Takes count words, and one more if that is
   odd. `out` and `total` must not overlap. Gives whether a total is not finite: what was written is of no use then. */
int privet_add_noise(const uint64_t *words, int64_t count, double scale, double grid, const float *total, float *out)
{
    const int64_t half = (count + 1) / 2, pairs = count / 2, block = 1024;
    int lost = 0;
#pragma omp parallel for schedule(static) reduction(| : lost) if (pairs > 4 * block)
    for (int64_t first = 0; first < pairs; first += block)
        lost |= add_noise(words, first, pairs - first < block ? pairs : first + block, half, scale, 1 / grid, grid,
                          total, out);
    if (pairs < half) {
        const uint64_t word[2] = {words[half - 1], words[2 * half - 1]};
        const float value[2] = {total[half - 1], 0};
        float found[2];
        lost |= add_noise(word, 0, 1, 1, scale, 1 / grid, grid, value, found);
        out[half - 1] = found[0];
    }
    return lost;
}

/* The losing-less loss. Mean squares of rows: out[n] = Σ x[n]² / size. */
void privet_mean_squares(const float *x, int64_t records, int64_t size, float *out)
{
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < records; n++) out[n] = (float)(squared_length(x + n * size, size) / (double)size);
}

FAST static void add_multiple(const float *restrict x, const float *restrict y, int64_t size, float factor,
                              float *restrict out)
{
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] + factor * y[i];
}

/* out[n] = x[n] + factor·factors[n·stride]·y[n], rows of `size` numbers. */
void privet_add_multiples(const float *x, const float *y, const float *factors, int64_t stride, float factor,
                          int64_t records, int64_t size, float *out)
{
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < records; n++)
        add_multiple(x + n * size, y + n * size, size, factor * factors[n * stride], out + n * size);
}

/* losses[n] = alpha·Focal_gamma + (1 - alpha)·SSE of the scores s of a record, and its slopes at them: with q the
   probabilities, p the target's and y one-hot, alpha·c·(y - q) + (1 - alpha)·(s - y), where
   c = gamma·p·(1 - p)^(gamma - 1)·log p - (1 - p)^gamma. 1 if a target is no class, else 0. */
int privet_curriculum(const float *scores, const int64_t *targets, int64_t records, int64_t classes, double alpha,
                      double gamma, float *losses, float *slopes)
{
    for (int64_t n = 0; n < records; n++)
        if (targets[n] < 0 || targets[n] >= classes) return 1;
#pragma omp parallel for schedule(static) if (records * classes > 16384)
    for (int64_t n = 0; n < records; n++) {
        const float *s = scores + n * classes;
        float *slope = slopes + n * classes;
        const int64_t target = targets[n];
        double sum = 0, squares = 0;
        float most = s[0];
        for (int64_t c = 1; c < classes; c++) most = s[c] > most ? s[c] : most;
        for (int64_t c = 0; c < classes; c++) sum += slope[c] = expf(s[c] - most);
        const double log_p = ((double)s[target] - most) - log(sum);
        double late = -log_p, steepness = -1;
        if (gamma != 0) {
            const double missed = -expm1(log_p), held = missed < FLT_MIN ? FLT_MIN : missed;
            const double power = pow(held, gamma);
            late = -power * log_p;
            steepness = gamma * exp(log_p) * (power / held) * log_p - power;
        }
        for (int64_t c = 0; c < classes; c++) {
            const double y = c == target, error = s[c] - y;
            squares += error * error;
            slope[c] = (float)(alpha * steepness * (y - slope[c] / sum) + (1 - alpha) * error);
        }
        losses[n] = (float)(alpha * late + (1 - alpha) / 2 * squares);
    }
    return 0;
}

/* The functions are found by name; there is nothing to see from Python. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, NULL, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
