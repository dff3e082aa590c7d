{{- /* What the bucket locked by lock.sql holds before and after a change that nothing refuses, and when it is full. The argument
       change is an expression, in microtokens. */ -}}
v_held        := {{ template "refilled_level" (dict "bucket" "v_") }};
      v_level       := moved_level(v_held, {{ .change }}, v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "v_") }};
{{- /**/ -}}
