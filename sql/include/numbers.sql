{{- /* The numbers that apply to a key, as columns after others: those of policy p, or of its live override o, if there is one. */ -}}
{{- range list "capacity" "tick" "every_us" "tick_us" "full_level" "gain" "tick_gain" "round_up" }},
                     case when o.key is null then p.{{ . }} else o.{{ . }} end as {{ . }}
{{- end -}}
