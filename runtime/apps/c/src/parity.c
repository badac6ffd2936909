#include "parity.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

/* What is known of the values of one side so far. */
typedef struct {
    bool finite;
    double low;
    double high;
} side;

/* A comparison under way: of all values, and of the vector that is being read. */
typedef struct {
    side actual;
    side expected;
    size_t count;
    double max_abs;
    double min_cosine;
    size_t length;
    double dot;
    double actual_squares;
    double expected_squares;
    bool equal;
} judge;

static void begin_vector(judge *j) {
    j->length = 0;
    j->dot = j->actual_squares = j->expected_squares = 0;
    j->equal = true;
}

static void see(side *s, double value) {
    s->finite = s->finite && isfinite(value);
    s->low = value < s->low ? value : s->low;
    s->high = value > s->high ? value : s->high;
}

static void add(judge *j, double a, double b) {
    const double difference = fabs(a - b);
    see(&j->actual, a);
    see(&j->expected, b);
    j->count++;
    j->length++;
    j->max_abs = tfx_worse_difference(j->max_abs, difference);
    j->dot += a * b;
    j->actual_squares += a * a;
    j->expected_squares += b * b;
    j->equal = j->equal && a == b;
}

/* Equal vectors have the cosine 1, two zero vectors among them; a zero vector beside another has 0. */
static void end_vector(judge *j) {
    if (j->length > 0) {
        const double norms = sqrt(j->actual_squares) * sqrt(j->expected_squares);
        double cosine = j->equal ? 1 : j->dot / (norms == 0 ? 1 : norms);
        cosine = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
        j->min_cosine = tfx_worse_cosine(j->min_cosine, cosine); /* keeps NaN, of values too large to be squared */
    }
    begin_vector(j);
}

static void never(tfx_comparison *result, const char *whose, const char *why, double value) {
    result->max_abs = result->min_cosine = NAN;
    snprintf(result->problem, sizeof result->problem, why, whose, value);
}

static bool sound(tfx_comparison *result, const judge *j, const side *s, const char *whose, bool floating) {
    if (!s->finite) {
        never(result, whose, "%s holds NaN or infinity", 0);
        return false;
    }
    if (floating && j->count > 1 && s->low == s->high) {
        never(result, whose, "%s is constant (%.6g everywhere)", s->low);
        return false;
    }
    return true;
}

static void conclude(judge *j, tfx_comparison *result, bool floating) {
    end_vector(j);
    if (j->count == 0) {
        never(result, "no", "nothing to judge: %s attended position", 0);
    } else if (sound(result, j, &j->actual, "output", floating) &&
               sound(result, j, &j->expected, "expected output", floating)) {
        result->max_abs = j->max_abs;
        result->min_cosine = j->min_cosine;
    }
}

static bool same_shape(const tfx_tensor *actual, const tfx_tensor *expected, tfx_comparison *result) {
    bool same = actual->rank == expected->rank;
    for (size_t i = 0; same && i < actual->rank; i++) {
        same = actual->shape[i] == expected->shape[i];
    }
    if (!same) {
        char found[64];
        char wanted[64];
        never(result, "shape", "%s", 0);
        snprintf(result->problem, sizeof result->problem, "shape %s, wanted %s",
                 tfx_show_shape(actual->shape, NULL, actual->rank, found, sizeof found),
                 tfx_show_shape(expected->shape, NULL, expected->rank, wanted, sizeof wanted));
    }
    return same;
}

static const side UNSEEN = {true, HUGE_VAL, -HUGE_VAL};

static judge start(void) {
    judge j = {.actual = UNSEEN, .expected = UNSEEN, .max_abs = 0, .min_cosine = 1};
    begin_vector(&j);
    return j;
}

tfx_comparison tfx_compare(const tfx_spec *spec, const tfx_tensor *actual, const tfx_tensor *expected,
                           const tfx_mask *mask) {
    tfx_comparison result = {NAN, NAN, false, ""};
    if (!same_shape(actual, expected, &result)) {
        return result;
    }
    const size_t rank = expected->rank;
    result.per_token = mask != NULL && mask->attended != NULL && rank >= 2 && expected->shape[0] == mask->batch &&
                       expected->shape[1] == mask->sequence && tfx_has_axis(spec, 0, "batch") &&
                       tfx_has_axis(spec, 1, "sequence");
    const size_t count = tfx_tensor_size(expected);
    /* Where a position has one number, the attended ones of the batch make one vector. */
    const size_t width = result.per_token && rank == 2 ? count : rank == 0 ? 1 : (size_t)expected->shape[rank - 1];
    const size_t positions = result.per_token ? (size_t)(mask->batch * mask->sequence) : 1;
    const size_t inner = positions == 0 ? 0 : count / positions;
    judge j = start();
    for (size_t i = 0; i < count; i++) {
        if (result.per_token && !mask->attended[i / inner]) {
            continue;
        }
        add(&j, tfx_value(actual, i), tfx_value(expected, i));
        if ((i + 1) % width == 0) {
            end_vector(&j);
        }
    }
    conclude(&j, &result, tfx_is_float(expected->dtype));
    return result;
}

tfx_comparison tfx_compare_row(const tfx_spec *spec, const tfx_tensor *actual, const tfx_tensor *expected) {
    tfx_comparison result = tfx_compare(spec, actual, expected, NULL);
    result.per_token = tfx_has_axis(spec, 0, "batch") && tfx_has_axis(spec, 1, "sequence");
    return result;
}

bool tfx_allows(const tfx_manifest *manifest, const tfx_comparison *comparison) {
    double cosine = manifest->min_cosine;
    if (comparison->per_token && !isnan(manifest->min_token_cosine)) {
        cosine = manifest->min_token_cosine;
    }
    return comparison->problem[0] == '\0' && (isnan(manifest->max_abs) || comparison->max_abs <= manifest->max_abs) &&
           (isnan(cosine) || comparison->min_cosine >= cosine);
}

double tfx_worse_difference(double a, double b) {
    return isnan(a) || a > b ? a : b;
}

double tfx_worse_cosine(double a, double b) {
    return isnan(a) || a < b ? a : b;
}

tfx_status tfx_mask_of(const tfx_manifest *manifest, const tfx_outputs *inputs, tfx_mask *mask, tfx_error *error) {
    memset(mask, 0, sizeof *mask);
    for (size_t i = 0; i < manifest->input_count; i++) {
        const tfx_spec *spec = &manifest->inputs[i];
        const tfx_tensor *values = tfx_outputs_find(inputs, spec->name);
        const bool ignores = strcmp(spec->role, "padding_mask") == 0;
        if ((!ignores && strcmp(spec->role, "attention_mask") != 0) || values == NULL || values->rank != 2) {
            continue;
        }
        const size_t count = tfx_tensor_size(values);
        const bool first = mask->attended == NULL;
        if (first) {
            mask->attended = malloc(count > 0 ? count * sizeof *mask->attended : 1);
            mask->batch = values->shape[0];
            mask->sequence = values->shape[1];
            if (mask->attended == NULL) {
                return tfx_no_memory(error);
            }
        } else if (values->shape[0] != mask->batch || values->shape[1] != mask->sequence) {
            continue;
        }
        for (size_t j = 0; j < count; j++) {
            const bool attends = (tfx_value(values, j) != 0) != ignores;
            mask->attended[j] = attends && (first || mask->attended[j]);
        }
    }
    return TFX_OK;
}
