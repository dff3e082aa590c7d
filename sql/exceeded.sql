-- The error of a guard that refuses.

-- The fields of draft-ietf-httpapi-ratelimit-headers for a denial: the tokens that are left of each quota. A policy's name is a string
-- of printable ASCII there, so anything else in it becomes a question mark.
create or replace function ratelimit.http_fields(policy text, denial ratelimit.decision)
  returns json language plpgsql stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name       text    := '"' || regexp_replace(regexp_replace(http_fields.policy collate "C", '[^ -~]', '?', 'g'), '(["\\])', '\\\1', 'g') || '"';
  v_retry_s    numeric := ceil(microseconds(denial.retry_after) / 1000000);
  v_reset_s    numeric := microseconds(denial.reset_after) / 1000000;
  v_window_s   numeric;  -- fills an empty bucket; null where the numbers are not those of the policy, or it does not refill
  v_token_s    numeric;  -- until there is more, as if a bucket that refills did so evenly
  v_is_quota   boolean;
begin
  select case when p.capacity = denial.capacity and (p.kind <> 'quota' or not p.overridden) then  -- a key may have another calendar
           ceil(coalesce(extract(epoch from t.turns_at - t.turned_at), short_wait(p.full_level, 0, 0, p) / 1000000.0))
         end, p.kind = 'quota'
    into v_window_s, v_is_quota
    from policies as p
   cross join lateral turns_of(p, clock()) as t
   where p.name = http_fields.policy collate "C";
  v_token_s := case when v_reset_s is not null then
                 least(v_retry_s, greatest(1, ceil(v_reset_s / case when v_is_quota then 1 else greatest(1, denial.capacity - denial.remaining) end)))
               end;
  return json_strip_nulls(json_build_object(
    'Retry-After',      v_retry_s::text,
    'RateLimit',        format('%s;r=%s', v_name, greatest(0, denial.remaining)) || coalesce(';t=' || v_token_s, ''),
    'RateLimit-Policy', format('%s;q=%s', v_name, denial.capacity) || coalesce(';w=' || v_window_s, '')));
end;
$$;
comment on function ratelimit.http_fields(text, ratelimit.decision) is
  'The fields of an HTTP response for a denial: Retry-After, RateLimit and RateLimit-Policy.';

-- PostgREST answers a request with these two documents. It wants all of code, message, status and headers, and texts in
-- headers; otherwise it answers 500.
create or replace function ratelimit.refuse_http(message text, detail text, remedy text, fields json)
  returns void language plpgsql
as $$
begin
  raise exception using
    errcode = 'PGRST',
    message = json_build_object('code', 'RL429', 'message', refuse_http.message, 'details', refuse_http.detail, 'hint', remedy)::text,
    detail  = json_build_object('status', 429, 'headers', fields)::text;
end;
$$;
comment on function ratelimit.refuse_http(text, text, text, json) is
  'Raises what PostgREST turns into a response of status 429.';

-- DETAIL never has the key: whoever sees the error may be somebody else. In a request of PostgREST, which sets
-- request.method, and wherever http is true, PostgREST gets its answer.
create or replace function ratelimit.rate_limit_exceeded(policy text, cost bigint, denial ratelimit.decision, http boolean)
  returns void language plpgsql
as $$
declare
  v_retry_s numeric := trim_scale(ratelimit.microseconds(denial.retry_after) / 1000000);
  v_detail  text    := format('{"policy": %s, "cost": %s, "remaining": %s, "retry_after": %s, "capacity": %s}',
                              to_json(rate_limit_exceeded.policy), cost, denial.remaining, coalesce(v_retry_s::text, 'null'), denial.capacity);
  v_hint    text    := case
    when v_retry_s is not null then format('Try again in %s.', ratelimit.counted(v_retry_s, 'second'))
    when cost > denial.capacity then format('A cost of %s never fits a bucket of %s.', cost, denial.capacity)
    else 'The bucket will not hold so many tokens by itself.'
  end;
begin
  if http or current_setting('request.method', true) <> '' then
    perform ratelimit.refuse_http('rate limit exceeded', v_detail, v_hint, ratelimit.http_fields(policy, denial));
  end if;
  raise exception 'rate limit exceeded' using errcode = 'RL429', detail = v_detail, hint = v_hint;
end;
$$;
comment on function ratelimit.rate_limit_exceeded(text, bigint, ratelimit.decision, boolean) is
  'Raises RL429, the error for a denial that a guard does not let pass.';
