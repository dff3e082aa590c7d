{{- /* Removes rows whose policy was dropped. The arguments are as in due_buckets. */ -}}
with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from {{ .table }} as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from {{ .table }} as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from {{ default "policies" .policies }} as p where p.id = i.id)
  )
  delete from {{ .table }} as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from {{ .table }} as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit {{ default "max_rows" .max_rows }}))
{{- /**/ -}}
