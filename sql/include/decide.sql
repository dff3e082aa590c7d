{{- /* Decides about one bucket, takes the tokens and returns the answer. The headers of acquire.sql, reserve.sql and
       acquire_up_to.sql list the steps. The locals are declared in locals.sql. The arguments buckets and keys are the names of
       the two tables. The argument kind is "reserve" or "up_to"; without it the function is ratelimit_acquire.
       A round is one pass of the loop: an update and, if it took nothing, a look. */ -}}
{{- /* Returns the replay if the idempotency key is live. */ -}}
{{ define "replay" -}}
{{ template "include/find_key.sql" . }}
        if v_first.expires_at > v_now then
          {{- if eq (default "" .kind) "up_to" }}
          perform check_repeated_range(v_first, v_cost, v_at_most);
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
          {{- else }}
          perform check_repeated_cost(v_first, v_cost);
          {{- if eq (default "" .kind) "reserve" }}
          return reserved_before(v_first, v_now, v_policy.shadow);
          {{- else }}
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
          {{- end }}
          {{- end }}
        end if;
{{- end -}}
{{- /* The condition under which nothing is taken from the bucket as it was read. */ -}}
{{ define "denied" -}}
{{ if eq (default "" .kind) "reserve" -}}
v_wanted = 0 or (v_retry_us <= v_max_us
                          and (v_retry_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true
{{- else if eq (default "" .kind) "up_to" -}}
v_retry_us is distinct from 0
{{- else -}}
v_wanted = 0 or v_retry_us is distinct from 0
{{- end }}
{{- end -}}
if v_idempotency_key is not null then
      {{ template "replay" . }}
    end if;

    loop
      if v_wanted > 0{{ if eq (default "" .kind) "up_to" }} and v_round is null{{ end }} then
        {{ template "include/charge.sql" . }}
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        {{ template "include/numbers_again.sql" . }}
      end if;
      {{ template "include/look.sql" (dict "buckets" .buckets "again" true "seen" .kind) }}
      if {{ template "denied" . }} then
        if v_idempotency_key is not null or v_policy.shadow then
          {{ template "replay" . }}
          {{- if not .kind }}
          if v_policy.shadow and v_retry_us is distinct from 0 then
            return shadow_of(v_level, v_reset_us, v_policy.capacity);
          end if;
          {{- else if eq (default "" .kind) "up_to" }}
          if v_policy.shadow then
            v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
            return partial_of(v_answer, v_at_most);
          end if;
          {{- end }}
        end if;
        {{- if eq (default "" .kind) "reserve" }}
        return reservation_of(v_cost = 0, v_level, v_retry_us, v_reset_us, v_policy.capacity, v_policy.shadow);
        {{- else if eq (default "" .kind) "up_to" }}
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
        {{- else }}
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        {{- end }}
      end if;
      {{- if .kind }}

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
      {{- if eq (default "" .kind) "reserve" }}
      v_wait_us := v_retry_us;
      {{- else }}
      v_granted := least(v_at_most, whole_tokens(v_level));
      v_wanted  := microtokens(v_granted);
      {{- end }}
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update {{ .buckets }} as b
           set level = v_level, refilled_at = v_refilled_at
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
        {{- if eq (default "" .kind) "reserve" }}
        v_wait_us := 0;  -- the next update takes what is there by then
        {{- end }}
      end if;
      {{- end }}

      -- The bucket has no row, or {{ if .kind }}another session has changed it{{ else }}it holds the cost by now{{ end }}. Without a row, this round makes one, less the tokens.
      -- Otherwise a second round takes them, unless another session changes the bucket in between. Each further
      -- round is due to another session.
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
      {{- if eq (default "" .kind) "reserve" }}
      if v_wait_us > 0 then
        v_ready_at   := v_now + duration(v_wait_us);
        v_expires_at := v_expires_at + duration(v_wait_us);
      end if;
      {{- end }}
      insert into {{ .keys }} as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at{{ if eq (default "" .kind) "reserve" }}, ready_at{{ end }})
      values (v_policy.id, v_key, v_idempotency_key, {{ if eq (default "" .kind) "up_to" }}v_granted{{ else }}v_cost{{ end }},
              {{ if eq (default "" .kind) "reserve" }}whole_tokens{{ else }}tokens_above_debt{{ end }}(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at{{ if eq (default "" .kind) "reserve" }}, v_ready_at{{ end }})
      {{ template "include/remember.sql" . }};
      if not found then  -- a live idempotency key: its tokens were taken already
        update {{ .buckets }} as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        {{ template "replay" . }}
      end if;
    end if;
    {{- if eq (default "" .kind) "reserve" }}
    return reservation_of(true, v_level, v_wait_us, v_reset_us, v_policy.capacity, v_policy.shadow);
    {{- else if eq (default "" .kind) "up_to" }}
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_granted end);
    {{- else }}
    return grant_of(v_level, v_reset_us, v_policy.capacity);
    {{- end }}
