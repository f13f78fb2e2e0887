# errors.awk - what amp.h's API half promises: a line "NUMBER FUNCTION..." per error, with the functions of which one at least
# returns it.  Named in a comment behind "Errors:", they are of the functions declared below it; the manual's ERRORS names
# those of every operator, of every call with a pointer, and of calls that take a number, allocate or use the device:
function general(name, functions,    group, i, n) {
    n = split(functions, group, ";")
    for (i = 1; i <= n; i++) print number[name], group[i]
}
function promised() {
    general("AMP_ERR_RANGE", "amp_open;amp_alloc;amp_copy amp_fill;amp_param_register;amp_autocast_begin;amp_operator_override;amp_random_save amp_random_load;amp_activation amp_activation_backward;amp_gemm;amp_grad_set_create;amp_scaler_create;amp_scaler_set_rule;amp_scaler_check;amp_scaler_update_with;amp_scaler_unscale;amp_scaler_save;amp_scaler_load;amp_optimizer_create;amp_optimizer_set_lr;amp_optimizer_set_clip;amp_optimizer_set_accumulation;amp_optimizer_set_weight;amp_optimizer_save amp_optimizer_load;amp_loader_create;amp_loader_seek;amp_loader_save amp_loader_load;amp_convert;amp_state_put;amp_mask_get;amp_settings_set;amp_settings_check;amp_settings_fill;amp_settings_apply;amp_status_get;amp_monitor_create;amp_monitor_phase;amp_monitor_write;amp_tensor_stats_create;amp_verify;amp_gradcheck;amp_advise;amp_tune;amp_recovery_create;amp_recovery_save amp_recovery_load")
    general("AMP_ERR_MEMORY", "amp_open;amp_alloc;amp_param_register;amp_operator_register;amp_layer_override;amp_autocast_cast;amp_random_save amp_random_load;amp_gemm;amp_grad_set_create;amp_grad_set_save;amp_scaler_create;amp_scaler_unscale;amp_scaler_save;amp_optimizer_create;amp_optimizer_set_weight;amp_optimizer_save amp_optimizer_load;amp_graph_begin;amp_loader_create;amp_loader_save amp_loader_load;amp_file_read_all;amp_state_create;amp_state_put;amp_state_encode;amp_state_decode;amp_mask_get;amp_settings_read_file;amp_monitor_create;amp_tensor_stats_create;amp_verify;amp_gradcheck;amp_tune;amp_recovery_create;amp_recovery_step;amp_recovery_batch;amp_recovery_save amp_recovery_load")
    general("AMP_ERR_DEVICE", "amp_open;amp_copy amp_fill;amp_event_record amp_event_wait;amp_cleanup;amp_grad_set_stats;amp_optimizer_set_weight;amp_graph_begin amp_graph_end amp_graph_launch;amp_mask_get;amp_settings_apply;amp_status_get;amp_monitor_create;amp_monitor_phase;amp_monitor_step;amp_monitor_epoch;amp_tensor_stats_step;amp_verify;amp_gradcheck;amp_advise;amp_recovery_create;amp_recovery_step;amp_recovery_memory;amp_recovery_batch")
}
/^\/\* Stop here/ { exit }
/^    X\(AMP_ERR_/ { split($0, result, "[(,]"); number[result[2]] = result[3] + 0 }
{ text = $0 }
comment == 0 && text ~ /^\/\*/ { said = ""; comment = 1; functions = "" }
comment && !(text ~ /^ +[a-z0-9_]+.*;.*\/\*/) { said = said " " text }
comment && text ~ /\*\// { comment = 0; next }
comment { next }
/^(AMP_API|AMPI_INLINE) / || /^} amp_|^$/ {
    if (/^(AMP_API|AMPI_INLINE) amp_result / && match($0, / amp_[a-z0-9_]+\(/)) {
        name = substr($0, RSTART + 1, RLENGTH - 2)
        # NULL is no scaler to two of these, and to two another context than the region's.
        if (/\*/ && name !~ /^amp_(scaler_update|scaler_update_with|autocast_end|recompute_end|open_abi)$/) print number["AMP_ERR_NULL"], name
        if (/_op \*op\)/) {
            split("103 104 110", always, " ")
            for (i in always) print always[i], name
            if (name ~ /_backward$/) print 106, name
        }
        below[said] = below[said] " " name
    }
}
END {
    promised()
    for (said in below) {
        if (!match(said, /Errors?( of [a-z]+)?:/)) continue
        rest = substr(said, RSTART)
        while (match(rest, /AMP_ERR_[A-Z0-9_]+/)) {
            print number[substr(rest, RSTART, RLENGTH)] below[said]
            rest = substr(rest, RSTART + RLENGTH)
        }
    }
}
