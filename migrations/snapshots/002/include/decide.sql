{{- /* Decides about one bucket, takes the tokens and returns the answer. The headers of acquire.sql, reserve.sql and
       acquire_up_to.sql list the steps. The locals are declared in locals.sql. The arguments buckets and keys are the names of
       the two tables. The argument kind is "acquire", "reserve" or "up_to": kinds.sql has what differs.
       A round is one pass of the loop: an update and, if it took nothing, a look. */ -}}
if v_idempotency_key is not null then
      {{ template "replay" . }}
    end if;

    loop
      if {{ template "to_take" . }} then
        {{- template "longest" . }}
        {{ template "include/charge.sql" . }}
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        {{ template "include/numbers_again.sql" . }}
      end if;
      {{ template "include/look.sql" (dict "buckets" .buckets "again" true "seen" (ne .kind "acquire") "bare" (eq .kind "reserve")) }}
      {{- template "retry" . }}
      if {{ template "denied" . }} then
        if v_idempotency_key is not null or v_policy.shadow then
          {{ template "replay" . }}
          {{- template "shadowed" . }}
        end if;
        {{ template "denial" . }}
      end if;
      {{- template "take_as_read" . }}

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
        v_reset_us    := {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "v_level" "elapsed_us" "0") }};
        v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
        -- The insert may wait for a session that creates the same row. The clock is not read again after that.
        insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
        on conflict on constraint {{ .buckets }}_pkey do nothing;
        exit when found;
      end if;
    end loop;

    v_reset_us := {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "v_level" "elapsed_us" "microseconds(v_now - v_refilled_at)") }};

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      {{- template "remember_grant" . }}
      {{ template "include/remember.sql" . }};
      if not found then  -- a live idempotency key: its tokens were taken already
        update {{ .buckets }} as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        {{ template "replay" . }}
      end if;
    end if;
    {{ template "grant" . }}
{{- /**/ -}}
