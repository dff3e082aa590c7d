{{- /* The clauses that find the bucket of u.key and v_policy, b, by its newest row version.
       While an old snapshot is held, the index keeps an entry for each page that has versions of the row. These entries
       are in the order of the pages, and the newest version is nearly always on the last page. So the index is read
       backwards, up to the first version that is visible. With key = ... the planner would drop the order by. */ -}}
where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1
{{- /**/ -}}
