/* The self-check: its stages in their order, and what each failure means. */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

tfx_stage *tfx_check_stage(const tfx_check *check) {
    return &check->report->stages[check->report->stage_count - 1];
}

void tfx_check_note(const tfx_check *check, const tfx_comparison *comparison) {
    tfx_stage *stage = tfx_check_stage(check);
    tfx_report *report = check->report;
    const bool first = stage->checked == 0;
    const bool first_of_all = first && isnan(report->max_abs);
    stage->max_abs = first ? comparison->max_abs : tfx_worse_difference(stage->max_abs, comparison->max_abs);
    stage->min_cosine = first ? comparison->min_cosine : tfx_worse_cosine(stage->min_cosine, comparison->min_cosine);
    report->max_abs = first_of_all ? stage->max_abs : tfx_worse_difference(report->max_abs, stage->max_abs);
    report->min_cosine = first_of_all ? stage->min_cosine : tfx_worse_cosine(report->min_cosine, stage->min_cosine);
    stage->checked++;
}

static void begin(tfx_report *report, const char *name) {
    report->stages[report->stage_count++] = (tfx_stage){name, false, 0, NAN, NAN};
}

/*
 * End the stage. What a function that is also used outside a check calls bad input is a check that failed here; a
 * machine that cannot stays one.
 */
static tfx_status end(tfx_report *report, tfx_status status, const tfx_error *error) {
    tfx_stage *stage = &report->stages[report->stage_count - 1];
    stage->passed = status == TFX_OK;
    if (status != TFX_OK) {
        report->failed = stage->name;
        snprintf(report->problem, sizeof report->problem, "%s", error->message);
    }
    return status == TFX_INPUT ? TFX_CHECK : status;
}

/* Copy what a file or a library says of itself, which may be printed to a terminal. */
static void show(char *target, size_t size, const char *text) {
    snprintf(target, size, "%s", text);
    tfx_clean(target);
}

static void describe(tfx_report *report, const tfx_manifest *manifest) {
    show(report->precision, sizeof report->precision, manifest->precision);
    show(report->target, sizeof report->target, manifest->target);
    show(report->layout, sizeof report->layout, manifest->layout);
    report->tolerance_max_abs = manifest->max_abs;
    report->tolerance_min_cosine = manifest->min_cosine;
    report->tolerance_min_token_cosine = manifest->min_token_cosine;
    report->promised_batch_variance = manifest->batch_variance;
}

static tfx_status open_golden(const tfx_bundle *bundle, tfx_golden *golden, tfx_error *error) {
    if (tfx_manifest_file(&bundle->manifest, TFX_GOLDEN_NAME) == NULL) {
        return tfx_fail(error, TFX_CHECK, "%s: has no %s, so there is nothing to compare with", bundle->folder,
                        TFX_GOLDEN_NAME);
    }
    char *path = tfx_bundle_path(bundle, TFX_GOLDEN_NAME);
    const tfx_status status = path == NULL ? tfx_no_memory(error) : tfx_golden_open(path, golden, error);
    free(path);
    return status == TFX_OK ? tfx_golden_check(golden, &bundle->manifest, error) : status;
}

/* Check the files, and open the golden, which is one of them. */
static tfx_status check_files(tfx_check *check, const tfx_bundle *bundle, tfx_error *error) {
    begin(check->report, "files");
    tfx_status status = tfx_bundle_check(bundle, &check->report->stages[0].checked, error);
    if (status == TFX_OK) {
        status = open_golden(bundle, &check->golden, error);
    }
    return end(check->report, status, error);
}

static tfx_status open_runtime(tfx_report *report, tfx_bundle *bundle, const tfx_options *options,
                               tfx_encoder **encoder, tfx_error *error) {
    tfx_library library;
    begin(report, "runtime");
    tfx_status status = tfx_library_open(options->library, &library, error);
    show(report->library, sizeof report->library, library.path);
    if (library.version[0] != '\0') {
        snprintf(report->runtime, sizeof report->runtime, "onnxruntime %s", library.version);
        tfx_clean(report->runtime);
    }
    if (status == TFX_OK) {
        status = tfx_encoder_new(bundle, &library, options->threads, encoder, error);
    }
    if (status == TFX_OK) {
        snprintf(report->provider, sizeof report->provider, "%s", (*encoder)->info.provider);
        report->stages[report->stage_count - 1].checked = 1;
    }
    return end(report, status, error);
}

static tfx_status check_numbers(tfx_check *check, tfx_error *error) {
    static const struct {
        const char *name;
        tfx_status (*run)(tfx_check *, tfx_error *);
    } STAGES[] = {{"tokens", tfx_check_tokens}, {"outputs", tfx_check_outputs}, {"vectors", tfx_check_vectors}};
    for (size_t i = 0; i < sizeof STAGES / sizeof STAGES[0]; i++) {
        begin(check->report, STAGES[i].name);
        TFX_TRY(end(check->report, STAGES[i].run(check, error), error));
    }
    return TFX_OK;
}

static tfx_status run_stages(tfx_report *report, tfx_bundle *bundle, const tfx_options *options, tfx_error *error) {
    tfx_check check = {.report = report};
    tfx_status status = check_files(&check, bundle, error);
    if (status == TFX_OK) {
        status = open_runtime(report, bundle, options, &check.encoder, error);
    }
    if (status == TFX_OK) {
        status = check_numbers(&check, error);
    }
    tfx_golden_close(&check.golden);
    tfx_close(check.encoder);
    return status;
}

static void reset(tfx_report *report) {
    memset(report, 0, sizeof *report);
    snprintf(report->app, sizeof report->app, "c");
    report->max_abs = report->min_cosine = NAN;
    report->tolerance_max_abs = report->tolerance_min_cosine = report->tolerance_min_token_cosine = NAN;
    report->batch_variance = report->promised_batch_variance = NAN;
}

tfx_status tfx_self_check(const char *folder, const tfx_options *options, tfx_report *report, tfx_error *error) {
    static const tfx_options defaults = {NULL, 0};
    tfx_error message = {""};
    tfx_bundle bundle;
    reset(report);
    tfx_status status = tfx_options_check(options, &message);
    if (status == TFX_OK) {
        status = tfx_bundle_open(folder, &bundle, &message);
    }
    if (status == TFX_OK) {
        describe(report, &bundle.manifest);
        status = run_stages(report, &bundle, options == NULL ? &defaults : options, &message);
        tfx_bundle_free(&bundle);
    } else {
        snprintf(report->problem, sizeof report->problem, "%s", message.message);
    }
    report->passed = status == TFX_OK;
    if (error != NULL) {
        *error = message;
    }
    return status;
}
