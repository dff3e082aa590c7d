{{- /* The calls of arithmetic.sql that pass seven arguments or more by position. Each is written once, here.
       They need the local v_now, and the small ones those of take.sql.
       bucket is the prefix of level and refilled_at: "b." for columns, "v_" for locals.
       policy is the prefix of the policy's columns: "v_policy." unless given.
       target, level, now and elapsed_us are expressions. refilled_level takes level and now in place of the bucket's and v_now,
       and so does wait_for with now. */ -}}
{{ define "refilled_level" -}}
{{ $policy := default "v_policy." .policy -}}
refilled_level({{ default (printf "%slevel" .bucket) .level }}, {{ .bucket }}refilled_at, {{ default "v_now" .now }}, {{ $policy }}full_level, {{ $policy }}gain, {{ $policy }}every_us, {{ $policy }}tick)
{{- end }}
{{ define "wait_for" -}}
{{ $policy := default "v_policy." .policy -}}
wait_for({{ .target }}, {{ .bucket }}level, {{ .bucket }}refilled_at, {{ default "v_now" .now }}, {{ $policy }}every_us, {{ $policy }}tick_us, {{ $policy }}tick_gain, {{ $policy }}round_up)
{{- end }}
{{ define "time_below" -}}
{{ $policy := default "v_policy." .policy -}}
time_below({{ .target }}, {{ .level }}, {{ .elapsed_us }}, {{ $policy }}every_us, {{ $policy }}tick_us, {{ $policy }}tick_gain, {{ $policy }}round_up)
{{- end }}
{{ define "wait_below" -}}
{{ $policy := default "v_policy." .policy -}}
wait_below({{ .target }}, {{ .level }}, {{ .elapsed_us }}, {{ $policy }}every_us, {{ $policy }}tick_us, {{ $policy }}tick_gain, {{ $policy }}round_up)
{{- end }}
{{ define "refilled_level_small" -}}
refilled_level_small({{ .bucket }}level, {{ .bucket }}refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick)
{{- end }}
{{ define "wait_below_small" -}}
wait_below_small({{ .target }}, {{ .level }}, {{ .elapsed_us }}, v_gain, v_per, v_tick_us)
{{- end }}
