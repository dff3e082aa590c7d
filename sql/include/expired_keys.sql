{{- /* Removes expired idempotency keys. The arguments are as in due_buckets. */ -}}
delete from {{ .table }} as k
   where k.ctid = any (array(select d.ctid
                               from {{ .table }} as d
                              where d.expires_at <= {{ default "due_before" .due_before }}
                              order by d.expires_at
                              limit {{ default "max_rows" .max_rows }}
                                for update skip locked))
{{- /**/ -}}
