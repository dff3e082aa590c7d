-- The names of policies are strings of printable ASCII there, so anything else in them becomes a question mark. A replay has the level of
-- its time.
create or replace function ratelimit.http_fields(policy text, decision ratelimit.decision)
  returns json language plpgsql stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_policy     policies;
  v_name       text    := '"' || regexp_replace(regexp_replace(http_fields.policy collate "C", '[^ -~]', '?', 'g'), '(["\\])', '\\\1', 'g') || '"';
  v_retry_s    numeric := case when not decision.allowed then ceil(microseconds(decision.retry_after) / 1000000) end;
  v_reset_s    numeric := microseconds(decision.reset_after) / 1000000;
  v_window_s   numeric;  -- fills an empty bucket; null where the numbers are not those of the policy, or it does not refill
  v_token_s    numeric;  -- until there is more, as if a bucket that refills did so evenly
begin
  if decision.shadowed then
    return json '{}';
  end if;
  v_policy := p from policies as p where p.name = http_fields.policy collate "C";
  if v_policy.capacity = decision.capacity and (v_policy.kind <> 'quota' or not v_policy.overridden) then  -- a key may have another calendar
    v_window_s := ceil(coalesce(extract(epoch from t.turns_at - t.turned_at), short_wait(v_policy.full_level, 0, 0, v_policy) / 1000000.0))
                  from turns_of(v_policy, clock()) as t;
  end if;
  if v_reset_s is not null then
    v_token_s := v_reset_s / case when v_policy.kind = 'quota' then 1 else greatest(1, decision.capacity - decision.remaining) end;
    v_token_s := least(v_retry_s, greatest(1, ceil(v_token_s)));
  end if;
  return json_strip_nulls(json_build_object(
    'Retry-After',      v_retry_s::text,
    'RateLimit',        case when decision.replayed is not true then
                          format('%s;r=%s', v_name, greatest(0, decision.remaining)) || coalesce(';t=' || v_token_s, '')
                        end,
    'RateLimit-Policy', format('%s;q=%s', v_name, decision.capacity) || coalesce(';w=' || v_window_s, '')));
end;
$$;
comment on function ratelimit.http_fields(text, ratelimit.decision) is
  'The fields of an HTTP response for a decision: Retry-After, RateLimit and RateLimit-Policy.';

create or replace function ratelimit_http_fields(policy text, decision ratelimit.decision)
  returns json
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
begin
  perform check_name('policy', policy);
  if decision.capacity is null then
    perform refuse('decision', null, 'Pass the row that ratelimit_acquire returns.');
  end if;
  return http_fields(policy, decision);
end;
$$;
comment on function ratelimit_http_fields(text, ratelimit.decision) is
'Returns the fields of an HTTP response that tell a client about a decision, as an object of texts: RateLimit and RateLimit-Policy of
  draft-ietf-httpapi-ratelimit-headers, and of a denial that a wait ends Retry-After.
A replay has no RateLimit. A decision with shadowed true has no fields.
policy: the policy that decided.
decision: the row of ratelimit_acquire and the like.
Errors: 22023 for a bad argument.
Locks: nothing.
Writes: nothing.
Role: application.';
