-- The checks of arguments. Every error has a constant message, the facts in DETAIL and the remedy in HINT.

create or replace function ratelimit.counted(n numeric, noun text)
  returns text language sql immutable parallel safe
as $$
  select n::text || text ' ' || noun || case when n = numeric '1' then '' else 's' end
$$;
comment on function ratelimit.counted(numeric, text) is
  'A number with its noun, which has an s unless there is one.';

create or replace function ratelimit.refuse(argument text, fact text, remedy text)
  returns void language plpgsql
as $$
begin
  raise exception using
    errcode = '22023',
    message = 'invalid ' || argument,
    detail  = format('%s is %s.', argument, coalesce(fact, 'null')),
    hint    = remedy;
end;
$$;
comment on function ratelimit.refuse(text, text, text) is
  'Raises 22023 for one argument.';

create or replace function ratelimit.refuse_read_only()
  returns void language plpgsql
as $$
begin
  raise exception 'cannot write in a read-only transaction'
    using errcode = '25006',
          detail  = case when pg_is_in_recovery() then 'This server is a standby.'
                         else format('default_transaction_read_only is %s.', current_setting('default_transaction_read_only')) end,
          hint    = 'Call it on the primary, in a read-write transaction. ratelimit_peek works here, on a standby for durable policies.';
end;
$$;
comment on function ratelimit.refuse_read_only() is
  'Raises 25006 with what helps, where a statement that writes would show its SQL.';

create or replace function ratelimit.is_name(value text)
  returns boolean language sql immutable parallel safe
as $$
  select octet_length(value) between 1 and 512
$$;
comment on function ratelimit.is_name(text) is
  'Whether a policy, key or idempotency key has 1 to 512 bytes; null for null.';

create or replace function ratelimit.is_list(elements anyarray)
  returns boolean language sql immutable parallel safe
as $$
  select array_lower(elements, 1) = 1 and array_ndims(elements) = 1
$$;
comment on function ratelimit.is_list(anyarray) is
  'Whether an array has one dimension and is subscripted from 1; null for an empty one and for null.';

create or replace function ratelimit.check_name(argument text, value text)
  returns void language plpgsql
as $$
begin
  if ratelimit.is_name(value) is not true then
    perform ratelimit.refuse(argument,
      case when value is null then null when value = '' then 'empty' else octet_length(value) || ' bytes long' end,
      'Pass a text of 1 to 512 bytes.');
  end if;
end;
$$;
comment on function ratelimit.check_name(text, text) is
  'Raises 22023 unless a policy, key, idempotency key or holder has 1 to 512 bytes.';

create or replace function ratelimit.check_tokens(argument text, value bigint)
  returns void language plpgsql
as $$
begin
  if (value >= 0) is not true then
    perform ratelimit.refuse(argument, value::text,
      case argument
        when 'cost' then 'Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.'
        else 'Pass a whole number of tokens, 0 or more.'
      end);
  end if;
end;
$$;
comment on function ratelimit.check_tokens(text, bigint) is
  'Raises 22023 unless a cost or amount is zero or more.';

-- Inlined, unlike check_request: a valid request pays for no call.
create or replace function ratelimit.acceptable(key text, cost bigint)
  returns boolean language sql immutable parallel safe
as $$
  select (ratelimit.is_name(key) and cost >= 0) is true
$$;
comment on function ratelimit.acceptable(text, bigint) is
  'Whether check_request would accept this key and cost.';

create or replace function ratelimit.check_request(policy text, key text, cost bigint, idempotency_key text)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  perform ratelimit.check_tokens('cost', cost);
  if idempotency_key is not null then
    perform ratelimit.check_name('idempotency_key', idempotency_key);
  end if;
end;
$$;
comment on function ratelimit.check_request(text, text, bigint, text) is
  'Raises 22023 for the first argument of an acquire that is out of range.';

create or replace function ratelimit.check_charge(policy text, key text, cost bigint, idempotency_key text)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_request(policy, key, cost, idempotency_key);
  if cost > 9000000000000 then
    perform ratelimit.refuse('cost', cost::text, 'Pass 0 to 9000000000000 tokens.');
  end if;
end;
$$;
comment on function ratelimit.check_charge(text, text, bigint, text) is
  'Raises 22023 for the first argument of a charge or a settlement that is out of range.';

-- The length of months and years is not fixed.
create or replace function ratelimit.is_max_wait(max_wait interval)
  returns boolean language sql immutable parallel safe
as $$
  select max_wait between interval '0' and interval '365 days'
         and date_trunc('month', max_wait) = interval '0'
$$;
comment on function ratelimit.is_max_wait(interval) is
  'Whether a wait is fixed in length, and 365 days at most; null for null.';

create or replace function ratelimit.check_max_wait(max_wait interval)
  returns void language plpgsql
as $$
begin
  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.refuse('max_wait', max_wait::text,
      'Pass an interval of 0 to 365 days, in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_max_wait(interval) is
  'Raises 22023 unless a wait is fixed in length, and 365 days at most.';

create or replace function ratelimit.check_pause(policy text, key text, pause_for interval)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  if (ratelimit.is_max_wait(pause_for) and pause_for >= interval '1 millisecond') is not true then
    perform ratelimit.refuse('pause_for', pause_for::text, 'Pass an interval of 1 millisecond to 365 days, in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_pause(text, text, interval) is
  'Raises 22023 for the first argument of a pause that is out of range.';

create or replace function ratelimit.check_bounds(at_most bigint, at_least bigint)
  returns void language plpgsql
as $$
begin
  if (at_most >= 1) is not true then
    perform ratelimit.refuse('at_most', at_most::text, 'Pass a whole number of tokens, 1 or more.');
  elsif (at_least between 1 and at_most) is not true then
    perform ratelimit.refuse('at_least', at_least::text, 'Pass a whole number of tokens, from 1 to at_most.');
  end if;
end;
$$;
comment on function ratelimit.check_bounds(bigint, bigint) is
  'Raises 22023 unless 1 <= at_least <= at_most.';

create or replace function ratelimit.check_hold(policy text, key text, holder text, cost bigint)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  perform ratelimit.check_name('holder', holder);
  if (cost >= 1) is not true then
    perform ratelimit.refuse('cost', cost::text, 'Pass a whole number of slots, 1 or more; ratelimit_release gives them back.');
  end if;
end;
$$;
comment on function ratelimit.check_hold(text, text, text, bigint) is
  'Raises 22023 for the first argument about a holder that is out of range.';

create or replace function ratelimit.check_max_rows(max_rows integer)
  returns void language plpgsql
as $$
begin
  if (max_rows > 0) is not true then
    perform ratelimit.refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
end;
$$;
comment on function ratelimit.check_max_rows(integer) is
  'Raises 22023 unless a number of rows is one or more.';

create or replace function ratelimit.check_length(argument text, length integer, expected integer)
  returns void language plpgsql
as $$
begin
  if length is null or length is distinct from expected then
    perform ratelimit.refuse(argument, ratelimit.counted(length, 'element') || ' long, policies ' || expected,
      'Pass arrays of one length: element n of each is request n.');
  end if;
end;
$$;
comment on function ratelimit.check_length(text, integer, integer) is
  'Raises 22023 unless an array has an element for each request.';

create or replace function ratelimit.check_sizes(sizes integer[], length integer, idempotency_keys integer)
  returns void language plpgsql
as $$
begin
  if (0 <= all (sizes)) is not true then
    perform ratelimit.refuse('sizes', 'below zero or null for a request', 'Pass the number of elements of each request.');
  elsif (select coalesce(sum(s.size), 0) from unnest(sizes) as s (size)) <> length then
    perform ratelimit.refuse('sizes', format('%s in sum, policies %s long', (select sum(s.size) from unnest(sizes) as s (size)), ratelimit.counted(length, 'element')),
      'Pass the number of elements of each request.');
  elsif idempotency_keys <> cardinality(sizes) then
    perform ratelimit.refuse('idempotency_keys', format('%s long, sizes %s', ratelimit.counted(idempotency_keys, 'element'), cardinality(sizes)),
      'Pass one idempotency key, or null, for each request.');
  end if;
end;
$$;
comment on function ratelimit.check_sizes(integer[], integer, integer) is
  'Raises 22023 unless sizes splits length elements into requests, and there are as many idempotency keys, if any.';

-- Months and years are refused, because their length is not fixed. The limit of 1000 years counts a year as
-- 365.25 days of 24 hours.
create or replace function ratelimit.check_span(argument text, value interval)
  returns void language plpgsql
as $$
begin
  if value is null
     or not isfinite(value)
     or extract(year from value) <> 0
     or extract(month from value) <> 0
     or ratelimit.microseconds(value) not between 1 and ratelimit.microseconds(interval '365250 days') then
    perform ratelimit.refuse(argument, value::text,
      'Pass an interval of 1 microsecond to 365250 days (1000 years), in days or smaller units.'
      || case when argument = 'every' then ' What is full again each calendar month is a quota: period => ''1 month''.' else '' end);
  end if;
end;
$$;
comment on function ratelimit.check_span(text, interval) is
  'Raises 22023 unless an interval is fixed in length and between 1 microsecond and 1000 years.';

create or replace function ratelimit.check_numbers(capacity bigint, refill bigint, every interval)
  returns void language plpgsql
as $$
declare
  v_missing constant text := 'A new policy needs capacity, refill and every, or capacity and period, or capacity and lease.';
begin
  if (capacity between 0 and 9000000000000) is not true then
    perform ratelimit.refuse('capacity', capacity::text,
      case when capacity is null then v_missing else 'Pass 0 to 9000000000000 tokens.' end);
  end if;
  if (refill between 0 and 9000000000000) is not true then
    perform ratelimit.refuse('refill', refill::text, case when refill is null then v_missing else 'Pass 0 to 9000000000000 tokens.' end);
  end if;
  if every is null then
    perform ratelimit.refuse('every', null, v_missing);
  end if;
  perform ratelimit.check_span('every', every);
  if refill > 0 and capacity * ratelimit.microseconds(every) > refill * ratelimit.microseconds(interval '3652500 days') then
    perform ratelimit.refuse('refill', refill || ' every ' || every,
      'Refill faster or lower the capacity: an empty bucket must fill within 10000 years. Or pass refill 0: it fills when it is reset.');
  end if;
end;
$$;
comment on function ratelimit.check_numbers(bigint, bigint, interval) is
  'Raises 22023 for the first number of a policy or an override that is missing or out of range.';

create or replace function ratelimit.is_period(span interval)
  returns boolean language plpgsql immutable
as $$
declare
  v_months integer := case when isfinite(span) then extract(year from span)::integer * 12 + extract(month from span)::integer end;
begin
  return isfinite(span) and (v_months = 0 and span = make_interval(days => extract(day from span)::integer)
                                          and extract(day from span) between 1 and 365250
                             or span = make_interval(months => v_months) and extract(day from span) = 0
                                and v_months between 1 and 12000);
end;
$$;
comment on function ratelimit.is_period(interval) is
  'Whether an interval is whole days or whole months, of 1 day to 1000 years; null for null.';

create or replace function ratelimit.check_history(history interval, period interval)
  returns void language plpgsql
as $$
begin
  if period is null then
    perform ratelimit.refuse('history', history::text, 'Only a quota has periods to keep. Leave it out, or drop the policy and define it anew with a period.');
  elsif history <> interval '0' and not ratelimit.is_period(history) then
    perform ratelimit.refuse('history', history::text, 'Pass whole days or whole months, such as ''90 days'' or ''2 years'', of 1 day to 1000 years, or 0 to keep no more.');
  end if;
end;
$$;
comment on function ratelimit.check_history(interval, interval) is
  'Raises 22023 unless a policy of this period can keep its usage for so long.';

-- A quota has a calendar in place of refill, every and stepped.
create or replace function ratelimit.check_calendar(refill bigint, every interval, stepped boolean, period interval, time_zone text, anchor timestamp)
  returns void language plpgsql
as $$
declare
  v_time_zone text collate "C" := coalesce(time_zone, 'UTC');  -- null: that of the policy, which was checked
begin
  if period is null then
    perform ratelimit.refuse(g.argument, g.value, 'Only a quota has a calendar. Leave it out, or drop the policy and define it anew with a period.')
      from (values ('time_zone', time_zone), ('anchor', anchor::text)) as g (argument, value)
     where g.value is not null;
    return;
  end if;
  perform ratelimit.refuse(g.argument, g.value,
    'A quota is full at each turn of its calendar and gains nothing in between. Leave it out, or drop the policy and define it anew.')
    from (values ('refill', refill::text), ('every', every::text), ('stepped', stepped::text)) as g (argument, value)
   where g.value is not null;
  if ratelimit.is_period(period) is not true then
    perform ratelimit.refuse('period', period::text, 'Pass whole days or whole months, such as ''7 days'', ''1 month'' or ''1 year'', of 1 day to 1000 years.');
  elsif v_time_zone <> 'UTC' and (v_time_zone !~ '/' or v_time_zone ~ '^(posix|right)/' or not exists (select from pg_catalog.pg_timezone_names as z where z.name = v_time_zone)) then
    perform ratelimit.refuse('time_zone', time_zone, 'Pass ''UTC'', or a name with a slash that pg_timezone_names lists, such as ''Europe/Berlin''.');
  elsif (extract(year from anchor) between 1 and 9999) is not true or anchor < timestamp '0001-01-01' then
    perform ratelimit.refuse('anchor', anchor::text, 'Pass a local time of the years 1 to 9999, such as ''2024-01-31 00:00''.');
  end if;
end;
$$;
comment on function ratelimit.check_calendar(bigint, interval, boolean, interval, text, timestamp) is
  'Raises 22023 for the first argument of a quota that is out of range, or that a policy of another kind has.';

-- A policy with a lease lends slots in place of tokens.
create or replace function ratelimit.check_lease(capacity bigint, least_capacity bigint, lease interval)
  returns void language plpgsql
as $$
begin
  if (capacity between least_capacity and 10000) is not true then
    perform ratelimit.refuse('capacity', capacity::text,
      case when capacity is null then 'A new policy needs capacity, refill and every, or capacity and period, or capacity and lease.'
           else format('Pass %s to 10000 slots.', least_capacity) end);
  elsif (isfinite(lease) and date_trunc('month', lease) = interval '0'
         and lease between interval '1 millisecond' and interval '365250 days') is not true then
    perform ratelimit.refuse('lease', lease::text, 'Pass an interval of 1 millisecond to 365250 days (1000 years), in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_lease(bigint, bigint, interval) is
  'Raises 22023 unless there can be so many slots of a key, and such a lease.';

create or replace function ratelimit.check_only_slots(
    refill bigint, every interval, stepped boolean, remember interval, period interval, time_zone text, anchor timestamp)
  returns void language plpgsql
as $$
begin
  perform ratelimit.refuse(g.argument, g.value,
    case g.argument
      when 'remember' then 'A lease is known by its holder, and no idempotency key is remembered. Leave it out.'
      else 'Slots come back by ratelimit_release, or when the lease ends. Leave it out, or drop the policy and define it anew without a lease.'
    end)
    from (values ('refill', refill::text), ('every', every::text), ('stepped', stepped::text), ('remember', remember::text),
                 ('period', period::text), ('time_zone', time_zone), ('anchor', anchor::text)) as g (argument, value)
   where g.value is not null;
end;
$$;
comment on function ratelimit.check_only_slots(bigint, interval, boolean, interval, interval, text, timestamp) is
  'Raises 22023 for the first argument that a policy of slots cannot have.';

create or replace function ratelimit.refuse_slots(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'invalid policy' using
    errcode = '22023',
    detail  = format('Policy %L lends slots: it has a lease, and no tokens.', policy),
    hint    = 'Call ratelimit_hold, ratelimit_renew and ratelimit_release; ratelimit_peek shows what is free.';
end;
$$;
comment on function ratelimit.refuse_slots(text) is
  'Raises 22023 where a policy of tokens is needed.';

create or replace function ratelimit.refuse_tokens(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'invalid policy' using
    errcode = '22023',
    detail  = format('Policy %L has tokens, and lends no slots.', policy),
    hint    = 'Call ratelimit_acquire, or define another policy with a lease: select ratelimit_define_policy(''jobs'', capacity => 5, lease => ''5 minutes'').';
end;
$$;
comment on function ratelimit.refuse_tokens(text) is
  'Raises 22023 where a policy of slots is needed.';

create or replace function ratelimit.refuse_pause(policy text, key text)
  returns void language plpgsql
as $$
begin
  raise exception 'invalid policy' using
    errcode = '22023',
    detail  = format('The numbers of key %L of policy %L do not refill, so nothing would follow the pause.', key, policy),
    hint    = 'Stop the key with ratelimit_override and capacity 0; ratelimit_remove_override starts it again.';
end;
$$;
comment on function ratelimit.refuse_pause(text, text) is
  'Raises 22023 for the pause of a quota, of slots or of tokens that never refill.';

-- The statement ends the hint, so that it can be copied; a test runs it.
create or replace function ratelimit.refuse_unknown(policy text, numbers text default 'capacity => 10, refill => 10, every => ''1 second''')
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  raise exception 'unknown policy' using
    errcode = 'RL001',
    detail  = format('No policy is named %L.', policy),
    hint    = format('Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy(%L, %s).', policy, numbers);
end;
$$;
comment on function ratelimit.refuse_unknown(text, text) is
  'Raises RL001, the error for an unknown policy, or 22023 for what is no name; numbers are for the hint.';

create or replace function ratelimit.no_grant(policy text, idempotency_key text)
  returns void language plpgsql
as $$
begin
  raise exception 'no live grant under this idempotency key' using
    errcode = 'RL003',
    detail  = format('Policy %L does not remember %L for this bucket. Nothing was charged.', policy, idempotency_key),
    hint    = 'Pass the policy, the key and the idempotency key of the acquire. One that was denied or rolled back leaves nothing to settle. '
              'A job may take longer than the policy remembers: ratelimit_define_policy(policy, remember => ''7 days'').';
end;
$$;
comment on function ratelimit.no_grant(text, text) is
  'Raises RL003, the error of a settlement without a grant.';

create or replace function ratelimit.no_grants(elements bigint[], idempotency_key text)
  returns void language plpgsql
as $$
begin
  raise exception 'no live grant under this idempotency key' using
    errcode = 'RL003',
    detail  = format('%L is not remembered for these elements of the request: %s. Nothing was settled.', idempotency_key, array_to_string(elements, ', ')),
    hint    = 'Leave these elements out: what was acquired at cost 0, denied or rolled back has no grant. A job may take longer than the policy remembers: '
              'ratelimit_define_policy(policy, remember => ''7 days'').';
end;
$$;
comment on function ratelimit.no_grants(bigint[], text) is
  'Raises RL003, the error of a settlement of several elements without their grants.';

create or replace function ratelimit.another_cost(
    fact text, remedy text default 'Repeat a request with its first cost, and give a new request a new key.')
  returns void language plpgsql immutable
as $$
begin
  raise exception 'idempotency key used before with another cost' using
    errcode = 'RL002',
    detail  = fact,
    hint    = remedy;
end;
$$;
comment on function ratelimit.another_cost(text, text) is
  'Raises RL002, the error for another cost under a live idempotency key.';

create or replace function ratelimit.held_with_another_cost(holder text, held bigint, cost bigint)
  returns void language plpgsql immutable
as $$
begin
  raise exception 'the holder holds with another cost' using
    errcode = 'RL002',
    detail  = format('%L holds %s and is asked to hold %s.', holder, ratelimit.counted(held, 'slot'), cost),
    hint    = 'Repeat a request with its first cost. Give each attempt a holder of its own.';
end;
$$;
comment on function ratelimit.held_with_another_cost(text, bigint, bigint) is
  'Raises RL002, the error for a holder that holds with another cost.';

-- ratelimit_charge does not raise RL004: its repeat is answered again.
create or replace function ratelimit.refuse_repeat(granted ratelimit.idempotency_keys, cost bigint)
  returns void language plpgsql immutable
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.another_cost(format('%L was granted with cost %s and is requested again with cost %s.',
                                          granted.idempotency_key, granted.cost, cost));
  end if;
  raise exception 'the grant under this idempotency key was settled' using
    errcode = 'RL004',
    detail  = format('%L was granted with cost %s and settled with cost %s.', granted.idempotency_key, granted.cost, granted.settled),
    hint    = 'The operation is over, or was cancelled: do not repeat it. A new one needs a new key.';
end;
$$;
comment on function ratelimit.refuse_repeat(ratelimit.idempotency_keys, bigint) is
  'Raises RL002 for a repeat with another cost than the grant under its idempotency key, or else RL004: the grant was settled.';

create or replace function ratelimit.next_round(round integer, policy text, key text)
  returns integer language plpgsql stable
as $$
begin
  if round = 1000 then
    raise exception 'the bucket changed at every look'
      using errcode = '40001',
            detail  = format('Key %L of policy %L.', key, policy),
            hint    = 'Try again.';
  end if;
  return coalesce(round, 0) + 1;
end;
$$;
comment on function ratelimit.next_round(integer, text, text) is
  'Counts the looks at a bucket that other sessions change, from null on, and raises 40001 after a thousand.';

create or replace function ratelimit.refuse_policy(name text, policy ratelimit.policies)
  returns void language plpgsql stable
as $$
begin
  if policy.id is null then
    perform ratelimit.refuse_unknown(name);
  end if;
  perform ratelimit.refuse_ephemeral(policy);
end;
$$;
comment on function ratelimit.refuse_policy(text, ratelimit.policies) is
  'Raises RL001 or 22023 for a policy that was not found, and 0A000 for an ephemeral policy, on a standby.';

create or replace function ratelimit.policy_named(policy text)
  returns ratelimit.policies language plpgsql stable
as $$
declare
  v_name   text collate "C" := policy_named.policy;
  v_policy ratelimit.policies;
begin
  v_policy := p from ratelimit.policies as p where p.name = v_name;
  if v_policy.id is null then
    perform ratelimit.refuse_unknown(v_name);
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.policy_named(text) is
  'One policy by name, or RL001.';
