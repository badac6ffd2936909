/* What the stages of the self-check compare: tokens, outputs, vectors. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "tensor.h"

/* How many texts a case has that can be tokenized: none in a bundle without a tokenizer. */
static size_t text_count(const tfx_check *check, size_t index) {
    return check->encoder->bundle.manifest.tokenizer == NULL ? 0 : check->golden.cases[index].text_count;
}

/* ---- tokens ---- */

/* Say which text differs, and how. */
static tfx_status differs(const tfx_case *each, size_t row, const char *what, size_t place, int64_t found,
                          int64_t wanted, tfx_error *error) {
    return tfx_fail(error, TFX_CHECK, "text %zu of %s (\"%.40s\"): %s %zu is %lld, wanted %lld", row, each->id,
                    each->texts[row], what, place, (long long)found, (long long)wanted);
}

/* Compare one text's tokens with a row of recorded ids or types; beyond them there is only padding. */
static tfx_status compare_tokens(const tfx_case *each, size_t row, const char *what, const int64_t *found,
                                 const tfx_tokens *tokens, const tfx_tensor *recorded, const tfx_mask *mask,
                                 int64_t padding, tfx_error *error) {
    if (recorded->rank != 2 || recorded->shape[0] != (int64_t)each->text_count) {
        return tfx_fail(error, TFX_CHECK, "%s of %s: wanted a row for each of %zu texts", recorded->name, each->id,
                        each->text_count);
    }
    const size_t length = (size_t)recorded->shape[1];
    size_t wanted = length;
    if (mask->attended != NULL && mask->batch == recorded->shape[0] && mask->sequence == recorded->shape[1]) {
        while (wanted > 0 && !mask->attended[row * length + wanted - 1]) {
            wanted--;
        }
    } else { /* without a mask, what equals the padding id at the end of a row counts as padding */
        while (wanted > tokens->count && tfx_integer(recorded, row * length + wanted - 1) == padding) {
            wanted--;
        }
    }
    for (size_t i = 0; i < wanted && i < tokens->count; i++) {
        if (found[i] != tfx_integer(recorded, row * length + i)) {
            return differs(each, row, what, i, found[i], tfx_integer(recorded, row * length + i), error);
        }
    }
    if (wanted != tokens->count) {
        return tfx_fail(error, TFX_CHECK, "text %zu of %s (\"%.40s\"): found %zu tokens, wanted %zu", row, each->id,
                        each->texts[row], tokens->count, wanted);
    }
    return TFX_OK;
}

static tfx_status check_text(const tfx_check *check, const tfx_case *each, size_t row, const tfx_outputs *inputs,
                             const tfx_mask *mask, tfx_error *error) {
    const tfx_manifest *manifest = &check->encoder->bundle.manifest;
    tfx_tokens tokens;
    tfx_error reason;
    const tfx_status made = tfx_tokenize(check->encoder, each->texts[row], &tokens, &reason);
    if (made != TFX_OK) {
        return tfx_fail(error, made, "text %zu of %s: %s", row, each->id, reason.message);
    }
    tfx_status status = TFX_OK;
    size_t compared = 0;
    for (size_t i = 0; i < manifest->input_count && status == TFX_OK; i++) {
        const tfx_spec *spec = &manifest->inputs[i];
        const bool ids = strcmp(spec->role, "token_ids") == 0;
        const tfx_tensor *recorded = tfx_outputs_find(inputs, spec->name);
        if (recorded == NULL || (!ids && strcmp(spec->role, "token_type_ids") != 0)) {
            continue;
        }
        status = compare_tokens(each, row, ids ? "id" : "type", ids ? tokens.ids : tokens.types, &tokens, recorded,
                                mask, ids ? manifest->pad_id : 0, error);
        compared++;
    }
    if (status == TFX_OK && compared == 0) {
        status = tfx_fail(error, TFX_CHECK, "golden: case %s records no tokens of its texts", each->id);
    }
    tfx_tokens_free(&tokens);
    tfx_check_stage(check)->checked++;
    return status;
}

static tfx_status check_case_tokens(const tfx_check *check, size_t index, tfx_error *error) {
    const tfx_case *each = &check->golden.cases[index];
    tfx_outputs inputs;
    tfx_mask mask;
    TFX_TRY(tfx_golden_inputs(&check->golden, index, &inputs, error));
    tfx_status status = tfx_mask_of(&check->encoder->bundle.manifest, &inputs, &mask, error);
    for (size_t row = 0; row < each->text_count && status == TFX_OK; row++) {
        status = check_text(check, each, row, &inputs, &mask, error);
    }
    free(mask.attended);
    tfx_outputs_free(&inputs);
    return status;
}

tfx_status tfx_check_tokens(tfx_check *check, tfx_error *error) {
    const tfx_encoder *encoder = check->encoder;
    if (encoder->bundle.manifest.tokenizer != NULL &&
        encoder->tokenizer == NULL) { /* no text can ever be given to it */
        return tfx_fail(error, encoder->tokenizer_status, "%s", encoder->tokenizer_problem.message);
    }
    for (size_t i = 0; i < check->golden.count; i++) {
        if (text_count(check, i) > 0) {
            TFX_TRY(check_case_tokens(check, i, error));
        }
    }
    return TFX_OK;
}

/* ---- outputs ---- */

/* The failures of a stage: the first one's words, and how many there are. */
typedef struct {
    size_t failed;
    char first[400];
} failures;

static const char *cosine_text(double value, char buffer[32]) {
    snprintf(buffer, 32, "%.8f", value);
    return isnan(value) ? "none" : buffer;
}

static void fail_at(failures *f, const char *output, const char *where, const tfx_comparison *comparison) {
    if (f->failed++ > 0) {
        return;
    }
    if (comparison->problem[0] != '\0') {
        snprintf(f->first, sizeof f->first, "%s in %s: %s", output, where, comparison->problem);
    } else {
        char cosine[32];
        snprintf(f->first, sizeof f->first, "%s in %s: max abs %.3g, cosine %s", output, where, comparison->max_abs,
                 cosine_text(comparison->min_cosine, cosine));
    }
}

static const char *bound(double value, char buffer[32]) {
    snprintf(buffer, 32, "%.6g", value);
    return isnan(value) ? "any" : buffer;
}

static tfx_status conclude(const tfx_check *check, const failures *f, tfx_error *error) {
    const tfx_manifest *manifest = &check->encoder->bundle.manifest;
    const tfx_stage *stage = tfx_check_stage(check);
    char difference[32];
    char cosine[32];
    char found[32];
    if (f->failed == 0) {
        return TFX_OK;
    }
    return tfx_fail(error, TFX_CHECK, "%zu of %zu differ: max abs %.3g (allowed %s), cosine %s (wanted %s); first %s",
                    f->failed, stage->checked, stage->max_abs, bound(manifest->max_abs, difference),
                    cosine_text(stage->min_cosine, found), bound(manifest->min_cosine, cosine), f->first);
}

static tfx_status compare_case(const tfx_check *check, const tfx_case *each, const tfx_outputs *found,
                               const tfx_outputs *recorded, const tfx_mask *mask, failures *f, tfx_error *error) {
    const tfx_manifest *manifest = &check->encoder->bundle.manifest;
    for (size_t i = 0; i < recorded->count; i++) {
        const tfx_tensor *expected = &recorded->items[i];
        const tfx_tensor *actual = tfx_outputs_find(found, expected->name);
        const tfx_spec *spec = tfx_manifest_output(manifest, expected->name);
        if (actual == NULL || spec == NULL) {
            return tfx_fail(error, TFX_CHECK, "output %s is missing in %s", expected->name, each->id);
        }
        const tfx_comparison comparison = tfx_compare(spec, actual, expected, mask);
        tfx_check_note(check, &comparison);
        if (!tfx_allows(manifest, &comparison)) {
            fail_at(f, expected->name, each->id, &comparison);
        }
    }
    return TFX_OK;
}

static tfx_status run_case(const tfx_check *check, size_t index, failures *f, tfx_error *error) {
    const tfx_case *each = &check->golden.cases[index];
    tfx_outputs inputs;
    tfx_outputs found = {NULL, 0};
    tfx_outputs recorded = {NULL, 0};
    tfx_mask mask;
    tfx_error reason;
    TFX_TRY(tfx_golden_inputs(&check->golden, index, &inputs, error));
    tfx_status status = tfx_mask_of(&check->encoder->bundle.manifest, &inputs, &mask, error);
    if (status == TFX_OK) {
        status = tfx_run(check->encoder, inputs.items, inputs.count, &found, &reason);
        if (status != TFX_OK) {
            tfx_fail(error, status, "%s: %s", each->id, reason.message);
        }
    }
    if (status == TFX_OK) {
        status = tfx_golden_outputs(&check->golden, index, &recorded, error);
    }
    if (status == TFX_OK) {
        status = compare_case(check, each, &found, &recorded, &mask, f, error);
    }
    free(mask.attended);
    tfx_outputs_free(&inputs);
    tfx_outputs_free(&found);
    tfx_outputs_free(&recorded);
    return status;
}

/* An output that was not recorded could be anything. */
static tfx_status check_recorded(const tfx_check *check, tfx_error *error) {
    const tfx_manifest *manifest = &check->encoder->bundle.manifest;
    for (size_t i = 0; i < check->golden.count; i++) {
        for (size_t j = 0; j < manifest->output_count; j++) {
            if (tfx_golden_output(&check->golden, i, manifest->outputs[j].name) == NULL) {
                return tfx_fail(error, TFX_CHECK, "golden: case %s does not record %s", check->golden.cases[i].id,
                                manifest->outputs[j].name);
            }
        }
    }
    return TFX_OK;
}

tfx_status tfx_check_outputs(tfx_check *check, tfx_error *error) {
    failures f = {0, ""};
    TFX_TRY(check_recorded(check, error));
    for (size_t i = 0; i < check->golden.count; i++) {
        TFX_TRY(run_case(check, i, &f, error));
    }
    return conclude(check, &f, error);
}

/* ---- vectors ---- */

/* What the app makes of texts by its own road: vectors where the bundle has pooling, else every output. */
static tfx_status make_vectors(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_outputs *results,
                               tfx_error *error) {
    if (encoder->pooled == NULL) {
        return tfx_run_texts(encoder, texts, count, results, error);
    }
    tfx_tensor vectors;
    TFX_TRY(tfx_embed(encoder, texts, count, &vectors, error));
    tfx_status status = TFX_OK;
    for (size_t i = 0; i < count && status == TFX_OK; i++) {
        status = tfx_outputs_new(&results[i], 1, error);
        if (status == TFX_OK) {
            status = tfx_copy_row(encoder->pooled, &vectors, i, 0, &results[i].items[0], error);
        }
    }
    tfx_tensor_free(&vectors);
    return status;
}

/* Largest difference between what a text gives alone and beside others. */
static tfx_status vary(const tfx_check *check, const char *text, const tfx_outputs *together, tfx_error *error) {
    tfx_outputs alone = {NULL, 0};
    const tfx_status status = make_vectors(check->encoder, &text, 1, &alone, error);
    double *worst = &check->report->batch_variance;
    for (size_t i = 0; status == TFX_OK && i < together->count; i++) {
        const size_t count = tfx_tensor_size(&together->items[i]);
        const bool same = i < alone.count && tfx_tensor_size(&alone.items[i]) == count;
        for (size_t j = 0; j < count; j++) {
            const double difference =
                same ? fabs(tfx_value(&together->items[i], j) - tfx_value(&alone.items[i], j)) : NAN;
            *worst = tfx_worse_difference(*worst, difference);
        }
    }
    tfx_outputs_free(&alone);
    return status;
}

/* Compare what one text gave with what was recorded for its row. */
static tfx_status compare_text(const tfx_check *check, const tfx_case *each, size_t row, const tfx_outputs *result,
                               const tfx_outputs *recorded, failures *f, tfx_error *error) {
    const tfx_manifest *manifest = &check->encoder->bundle.manifest;
    tfx_comparison worst = {0, 1, false, ""};
    const size_t failed = f->failed;
    size_t compared = 0;
    for (size_t i = 0; i < result->count; i++) {
        const tfx_tensor *actual = &result->items[i];
        const tfx_spec *spec = tfx_manifest_output(manifest, actual->name);
        const tfx_tensor *expected = tfx_outputs_find(recorded, actual->name);
        tfx_tensor wanted;
        if (spec == NULL || expected == NULL) {
            return tfx_fail(error, TFX_CHECK, "golden: case %s does not record %s", each->id, actual->name);
        }
        if (!tfx_has_axis(spec, 0, "batch")) {
            continue; /* not a text's own */
        }
        const size_t length = actual->rank > 0 ? (size_t)actual->shape[0] : 0;
        TFX_TRY(tfx_copy_row(spec, expected, row, length, &wanted, error));
        const tfx_comparison comparison = tfx_compare_row(spec, actual, &wanted);
        tfx_tensor_free(&wanted);
        compared++;
        worst.max_abs = tfx_worse_difference(worst.max_abs, comparison.max_abs);
        worst.min_cosine = tfx_worse_cosine(worst.min_cosine, comparison.min_cosine);
        if (f->failed == failed && !tfx_allows(manifest, &comparison)) {
            char where[160];
            snprintf(where, sizeof where, "text %zu of %.60s (\"%.40s\")", row, each->id, each->texts[row]);
            fail_at(f, actual->name, where, &comparison);
        }
    }
    if (compared == 0) {
        return tfx_fail(error, TFX_CHECK, "text %zu of %s (\"%.40s\"): nothing to compare", row, each->id,
                        each->texts[row]);
    }
    tfx_check_note(check, &worst);
    return TFX_OK;
}

static tfx_status compare_texts(const tfx_check *check, size_t index, const tfx_outputs *results, failures *f,
                                tfx_error *error) {
    const tfx_case *each = &check->golden.cases[index];
    tfx_outputs recorded;
    TFX_TRY(tfx_golden_outputs(&check->golden, index, &recorded, error));
    tfx_status status = TFX_OK;
    for (size_t row = 0; row < each->text_count && status == TFX_OK; row++) {
        status = compare_text(check, each, row, &results[row], &recorded, f, error);
    }
    tfx_outputs_free(&recorded);
    return status;
}

static tfx_status check_texts(const tfx_check *check, const char **texts, size_t count, tfx_outputs *results,
                              tfx_error *error) {
    failures f = {0, ""};
    size_t done = 0;
    TFX_TRY(make_vectors(check->encoder, texts, count, results, error));
    for (size_t i = 0; i < check->golden.count; i++) {
        if (text_count(check, i) > 0) {
            TFX_TRY(compare_texts(check, i, results + done, &f, error));
            done += text_count(check, i);
        }
    }
    TFX_TRY(conclude(check, &f, error));
    check->report->batch_variance = 0;
    for (size_t i = 0; i < count; i++) {
        TFX_TRY(vary(check, texts[i], &results[i], error));
    }
    if (!isfinite(check->report->batch_variance)) {
        return tfx_fail(error, TFX_CHECK,
                        "a text's values alone and beside others: their difference is NaN or infinity");
    }
    return TFX_OK;
}

tfx_status tfx_check_vectors(tfx_check *check, tfx_error *error) {
    size_t count = 0;
    for (size_t i = 0; i < check->golden.count; i++) {
        count += text_count(check, i);
    }
    if (count == 0) {
        return TFX_OK;
    }
    const char **texts = calloc(count, sizeof *texts);
    tfx_outputs *results = calloc(count, sizeof *results);
    tfx_status status = TFX_OK;
    if (texts == NULL || results == NULL) {
        status = tfx_no_memory(error);
    } else {
        size_t place = 0;
        for (size_t i = 0; i < check->golden.count; i++) {
            for (size_t row = 0; row < text_count(check, i); row++) {
                texts[place++] = check->golden.cases[i].texts[row];
            }
        }
        status = check_texts(check, texts, count, results, error);
    }
    for (size_t i = 0; results != NULL && i < count; i++) {
        tfx_outputs_free(&results[i]);
    }
    free(results);
    free(texts);
    return status;
}
