{{- /* Decides about one bucket and takes the tokens; the steps are told in acquire.sql. Written once over the
       names of the bucket's two tables, for ratelimit_acquire and ratelimit_acquire_many.
       In:  v_policy, v_key, v_cost, v_idempotency_key, v_now; v_take, the microtokens wanted: v_cost, or for
            equal requests without a key a multiple of it, lowered here to as many as the bucket holds; zero
            to take nothing. v_replayed and v_round are null. With the argument newest, which ratelimit_acquire_many
            has, the bucket is found by its newest version. That is cheap however long an old snapshot is
            held, but who had to wait for the row then finds nothing, with the newer minor versions of
            PostgreSQL, and takes in a second try.
       Out: v_replayed, and then v_first, the answer to repeat; otherwise v_level, v_reset_us and v_take, what
            was taken; when that is zero, v_retry_us. */ -}}
{{- /* Without statistics, the index on expires_at would look as good as the key: it is no condition. */ -}}
{{ define "find_key" -}}
select k.* into v_first
          from {{ .keys }} as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
{{- end -}}
{{ define "remember_anew" -}}
on conflict on constraint {{ .keys }}_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now
{{- end -}}
<<decide>>
    begin
      if v_idempotency_key is not null then
        {{ template "find_key" . }}
        exit decide when v_replayed;
      end if;

      loop
        if v_take > 0 then
          update {{ .buckets }} as b
             set level       = refilled_level(b.level, b.refilled_at, v_now,
                                              v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_take,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where {{ if .newest -}}
                 b.ctid = (select b.ctid
                             from {{ .buckets }} as b
                            {{ template "newest.sql" (dict "policy_id" "v_policy.id" "key" "v_key") }})
                 {{- else -}}
                 b.policy_id = v_policy.id
             and b.key       = v_key
                 {{- end }}
             and refilled_level(b.level, b.refilled_at, v_now,
                                v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_take
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        {{ template "look.sql" . }}
        if v_take = 0 or v_retry_us <> 0 then
          v_take := 0;
          if v_idempotency_key is not null then
            {{ template "find_key" . }}
          end if;
          exit decide;
        end if;

        -- It fits by now, or the bucket has no row. Each round but the first lost against somebody else's call.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_take := least(v_take, v_level - v_level % microtokens(v_cost));
        if not found then
          v_level       := v_level - v_take;
          v_refilled_at := v_now;
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0,
                                      v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint {{ .buckets }}_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at),
                               v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into {{ .keys }} as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        {{ template "remember_anew" . }};
        if not found then
          update {{ .buckets }} as b
             set level = b.level + v_take
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          {{ template "find_key" . }}
        end if;
      end if;
    end decide;
