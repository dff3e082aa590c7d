{{- /* Finds one bucket, b, by its newest version. While an old snapshot is held, each page of versions has an entry
       of its own in the index, in the order of the pages, and the newest is nearly always on the last: hence
       backwards. Were the key compared by =, the planner would drop the order. The arguments are expressions. */ -}}
where b.policy_id = {{ .policy_id }}
       and b.key      >= {{ .key }}
       and b.key      <= {{ .key }}
     order by b.key desc
     limit 1
{{- /**/ -}}
