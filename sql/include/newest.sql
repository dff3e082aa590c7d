{{- /* The clauses that find one bucket, b, by its newest row version. The arguments policy_id and key are expressions.
       While an old snapshot is held, the index keeps an entry for each page that has versions of the row. These entries
       are in the order of the pages, and the newest version is nearly always on the last page. So the index is read
       backwards, up to the first version that is visible. With key = ... the planner would drop the order by. */ -}}
where b.policy_id = {{ default "v_policy.id" .policy_id }}
       and b.key      >= {{ .key }}
       and b.key      <= {{ .key }}
     order by b.key desc
     limit 1
{{- /**/ -}}
