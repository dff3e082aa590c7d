-- The error of a guard that refuses.

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
