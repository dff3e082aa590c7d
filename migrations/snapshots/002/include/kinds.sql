{{- /* What differs between the functions that decide.sql serves. Each piece has one text for each kind. */ -}}

{{- /* The condition under which a round begins with the update. Up to: its update is for all of at_most, and is worth one try. */ -}}
{{ define "to_take" -}}
{{ if eq .kind "up_to" -}}
v_wanted > 0 and v_round is null
{{- else -}}
v_wanted > 0
{{- end }}
{{- end -}}

{{- /* The last instant at which a reservation may be out of debt. The interval has no days, which may have 23 or 25 hours. */ -}}
{{ define "longest" -}}
{{ if eq .kind "reserve" }}
        v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
{{- end }}
{{- end -}}

{{- /* The wait of a reservation that the look found: until the debt is paid that it would leave, counted from the refill that
       it would round down. The look itself has none for it. */ -}}
{{ define "retry" -}}
{{ if eq .kind "reserve" }}
      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_retry_us    := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then {{ template "wait_for" (dict "target" "microtokens(v_cost)" "bucket" "v_") }}
                       end;
{{- end }}
{{- end -}}

{{- /* The condition under which nothing is taken from the bucket as it was read. */ -}}
{{ define "denied" -}}
{{ if eq .kind "acquire" -}}
v_wanted = 0 or v_retry_us is distinct from 0
{{- else if eq .kind "reserve" -}}
v_wanted = 0 or (v_retry_us <= microseconds(max_wait)
                          and (v_retry_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true
{{- else -}}
v_retry_us is distinct from 0
{{- end }}
{{- end -}}

{{- /* The answer of a denial, and that of a shadow policy in its place. */ -}}
{{ define "denial" -}}
{{ if eq .kind "acquire" -}}
return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
{{- else if eq .kind "reserve" -}}
return reservation_of(v_cost = 0, v_level, v_retry_us, v_reset_us, v_policy.capacity, v_policy.shadow);
{{- else -}}
v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
{{- end }}
{{- end -}}
{{ define "shadowed" -}}
{{ if eq .kind "acquire" }}
          if v_policy.shadow and v_retry_us is distinct from 0 then
            return shadow_of(v_level, v_reset_us, v_policy.capacity);
          end if;
{{- else if eq .kind "up_to" }}
          if v_policy.shadow then
            v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
            return partial_of(v_answer, v_at_most);
          end if;
{{- end }}
{{- end -}}

{{- /* Takes the tokens that the look found. An acquire does not: they are there now, so the next update takes them. */ -}}
{{ define "take_as_read" -}}
{{ if ne .kind "acquire" }}

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
{{- if eq .kind "up_to" }}
      v_granted := least(v_at_most, whole_tokens(v_level));
      v_wanted  := microtokens(v_granted);
{{- end }}
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update {{ .buckets }} as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;
{{- end }}
{{- end -}}

{{- /* Stores the grant under the idempotency key. The end of the statement is in remember.sql. */ -}}
{{ define "remember_grant" -}}
{{ if eq .kind "reserve" }}
      if v_level < 0 then
        v_ready_at   := v_refilled_at + duration({{ template "time_below" (dict "target" "0" "level" "v_level" "elapsed_us" "0") }}::bigint);
        v_expires_at := v_ready_at + duration(v_policy.remember_us);
      end if;
      insert into {{ .keys }} as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at, v_ready_at)
{{- else }}
      insert into {{ .keys }} as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, {{ if eq .kind "up_to" }}v_granted{{ else }}v_cost{{ end }},
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
{{- end }}
{{- end -}}

{{- /* Raises RL002 or RL004 for what is no repeat of a live grant. A repeat pays for no call. Without parentheses each field would
       be one more variable of the function: one made ratelimit_enforce dearer by 2 %. */ -}}
{{ define "check_repeat" -}}
if (v_first).cost {{ if eq .kind "up_to" }}not between v_cost and v_at_most{{ else }}<> v_cost{{ end }} or (v_first).settled is not null then
            perform {{ if eq .kind "up_to" }}check_repeated_range(v_first, v_cost, v_at_most){{ else }}check_repeated_cost(v_first, v_cost){{ end }};
            perform already_settled(v_first);
          end if;
{{- end -}}
{{- /* Returns the replay if the idempotency key is live. */ -}}
{{ define "replay" -}}
{{ template "include/find_key.sql" . }}
        if v_first.expires_at > v_now then
          {{ template "check_repeat" . }}
          {{- if eq .kind "acquire" }}
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
          {{- else if eq .kind "reserve" }}
          return reserved_before(v_first, v_now, v_policy.shadow);
          {{- else }}
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
          {{- end }}
        end if;
{{- end -}}

{{- /* The answer of a grant. The update may have waited, so the clock is read again: nobody waits longer than until the debt
       is paid. */ -}}
{{ define "grant" -}}
{{ if eq .kind "acquire" -}}
return grant_of(v_level, v_reset_us, v_policy.capacity);
{{- else if eq .kind "reserve" -}}
if v_level < 0 then
      return waiting_of(v_level,
                        greatest(0, {{ template "time_below" (dict "target" "0" "level" "v_level" "elapsed_us" "microseconds(clock() - v_refilled_at)") }})::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
{{- else -}}
v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_granted end);
{{- end }}
{{- end -}}
