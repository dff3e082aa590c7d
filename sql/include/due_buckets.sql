{{- /* Removes due buckets that are full or have no policy, and postpones the other due buckets; answers how many were due, and
       how many were removed. The argument table is the name of the table. The others are names, too, in place of those of the
       tables policies and overrides, and of the locals now, due_before, max_rows and most_us. */ -}}
{{ $now := default "v_now" .now -}}
{{ $most_us := default "v_most_us" .most_us -}}
{{ $policies := default "policies" .policies -}}
{{ $overrides := default "overrides" .overrides -}}
with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or case
                when (p.calendar).period is not null then
                  unused(p.calendar, b.level, b.refilled_at, {{ $now }})
                  and (o.key is null or unused(with_calendar(p.calendar, o.calendar, o.expires_at), b.level, b.refilled_at, {{ $now }}))
                else
                  wait_for(p.full_level, b.level, b.refilled_at, {{ $now }}, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0
                  and (o.key is null or wait_for(o.full_level, b.level, b.refilled_at, {{ $now }}, o.every_us, o.tick_us, o.tick_gain, o.round_up) = 0)
              end as removable
      from {{ .table }} as b
      left join {{ $policies }} as p on p.id = b.policy_id
      left join {{ $overrides }} as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > {{ $now }}
     where b.due_at <= {{ default "due_before" .due_before }}
     order by b.due_at
     limit {{ default "max_rows" .max_rows }}
       for update of b skip locked
  ), removed as (
    delete from {{ .table }} as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update {{ .table }} as b
       set due_at = (select case
                              when (p.calendar).period is not null then
                                coalesce(greatest((turning_if_known(p.calendar, {{ $now }})).turns_at,
                                                  case when o.key is not null then
                                                    (turning_if_known(with_calendar(p.calendar, o.calendar, o.expires_at), {{ $now }})).turns_at
                                                  end),
                                         {{ $now }} + duration({{ $most_us }}))
                              else
                                {{ $now }} + duration(least(greatest(coalesce(wait_for(p.full_level, b.level, b.refilled_at, {{ $now }}, p.every_us, p.tick_us, p.tick_gain, p.round_up), {{ $most_us }}),
                                                         case when o.key is not null then
                                                           coalesce(wait_for(o.full_level, b.level, b.refilled_at, {{ $now }}, o.every_us, o.tick_us, o.tick_gain, o.round_up), {{ $most_us }})
                                                         end),
                                                {{ $most_us }}))
                            end
                               from {{ $policies }} as p
                               left join {{ $overrides }} as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                           and o.expires_at > {{ $now }}
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
  )
  select (select count(*) from due), (select count(*) from removed)
{{- /**/ -}}
