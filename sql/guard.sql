-- The checks of ratelimit_guard, before it reads a row.
--
-- The guard runs with its owner's rights, and it reads a relation by the name inserted. So that must be the transition table
-- of the trigger. Without one, it would be what the inserting session calls so, a temporary view for example, and the
-- code of that view would run. Likewise the columns must be of these types themselves: to read a domain, an enum or any
-- other type as text, or to compare it, can be somebody's code.
create or replace function ratelimit.check_guard(relation oid, trigger_name name, arguments text[])
  returns void language plpgsql stable
as $$
declare
  v_least constant integer := array_lower(arguments, 1);
  v_usage constant text := 'Attach it like this: create trigger limited after insert on orders referencing new table as inserted '
                           'for each statement execute function ratelimit_guard(''policy'', ''key column''), and a cost column if there is one.';
begin
  if (cardinality(arguments) between 2 and 3) is not true then
    raise exception 'invalid trigger arguments'
      using errcode = '22023',
            detail  = format('The trigger has %s.', ratelimit.counted(coalesce(cardinality(arguments), 0), 'argument')),
            hint    = v_usage;
  end if;
  if not exists (select from pg_trigger as t
                  where t.tgrelid    = relation
                    and t.tgname     = trigger_name
                    and t.tgtype     = 4  -- after insert for each statement
                    and t.tgnewtable = 'inserted') then
    raise exception 'invalid trigger'
      using errcode = '22023',
            detail  = format('Trigger %I of %s is not one after insert for each statement with the transition table inserted.', trigger_name, relation::regclass),
            hint    = v_usage;
  end if;
  if to_regclass('pg_temp.inserted') is not null then  -- a trigger that was renamed during the statement is found above as another
    raise exception 'invalid trigger'
      using errcode = '22023',
            detail  = 'The session has a temporary relation called inserted, as the transition table is.',
            hint    = 'Rename or drop it.';
  end if;
  for v_n in v_least + 1..array_upper(arguments, 1) loop
    if not exists (select from pg_attribute as a
                    where a.attrelid     = relation
                      and a.attname      = arguments[v_n]
                      and a.attnum       > 0
                      and a.attgenerated in ('', 's')  -- a virtual column is not in a transition table
                      and (a.atttypid in ('integer'::regtype, 'bigint'::regtype)
                           or a.atttypid in ('text'::regtype, 'varchar'::regtype, 'uuid'::regtype) and v_n = v_least + 1)) then
      raise exception 'invalid column'
        using errcode = '22023',
              detail  = format('%s has no column %I of a type that the guard takes.', relation::regclass, arguments[v_n]),
              hint    = 'The key column is of type text, varchar, uuid, integer or bigint itself, the cost column of type integer or bigint.';
    end if;
  end loop;
end;
$$;
comment on function ratelimit.check_guard(oid, name, text[]) is
  'Raises 22023 unless a trigger and its arguments are such that ratelimit_guard may read rows.';

create or replace function ratelimit_guard()
  returns trigger
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- as in acquire_batch
as $$
declare
  v_policy policies;
  v_keys   text[];
  v_costs  bigint[];
  v_least  bigint;   -- the least cost of a row; -1 if one is null
  v_denial decision;
  v_batch  packed;
  v_worst  bigint;   -- the element with the longest wait
begin
  perform check_guard(tg_relid, tg_name, tg_argv);
  -- Rows are grouped by the column as it is, and not as text, which would be made for each row.
  execute format('select array_agg(g.key::text) filter (where g.cost > 0 or g.key is null),'
                 '       array_agg(least(g.cost, 9223372036854775807)::bigint) filter (where g.cost > 0 or g.key is null),'
                 '       min(g.least)'
                 '  from (select i.%I%s as key, %s as cost, %s as least from inserted as i group by 1) as g',
                 tg_argv[1],
                 (select ' collate "C"' from pg_attribute as a where a.attrelid = tg_relid and a.attname = tg_argv[1] and a.attcollation <> 0),
                 case tg_nargs when 3 then format('sum(i.%I)', tg_argv[2]) else 'count(*)' end,
                 case tg_nargs when 3 then format('min(coalesce(i.%I, -1))', tg_argv[2]) else '1' end)
    into v_keys, v_costs, v_least;
  if v_least < 0 then
    perform refuse('cost', 'null or below zero in a row', 'Insert costs of 0 or more.');
  end if;
  if v_keys is null then  -- nothing to charge
    return null;
  end if;
  v_policy := policy_named(tg_argv[0]);
  perform check_name('key', u.key) from unnest(v_keys) as u (key) where is_name(u.key) is not true limit 1;

  if cardinality(v_keys) = 1 then
    v_worst  := 1;
    v_denial := acquire(v_policy, v_keys[1], v_costs[1], null);
  else
    v_batch := acquire_batch(array_fill(v_policy.name, array[cardinality(v_keys)]), v_keys, v_costs, null, null);
    if v_batch.refused is not null then  -- the policy was dropped meanwhile
      raise exception using errcode = v_batch.error_codes[1], message = v_batch.error_messages[1],
                            detail  = v_batch.error_details[1], hint = v_batch.error_hints[1];
    end if;
    select false, d.remaining, duration(d.retry_us), duration(d.reset_us), d.capacity, d.element
      into v_denial.allowed, v_denial.remaining, v_denial.retry_after, v_denial.reset_after, v_denial.capacity, v_worst
      from unnest(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity)
           as d (element, remaining, retry_us, reset_us, capacity)
     where d.retry_us is distinct from 0
     order by d.retry_us desc nulls first
     limit 1;
  end if;
  if v_denial.allowed is false then
    perform rate_limit_exceeded(v_policy.name, v_costs[v_worst], v_denial, false);
  end if;
  return null;
end;
$$;
comment on function ratelimit_guard() is
'Charges the key of each row that a statement inserts into a table, or raises RL429.
It is a trigger function. An error rolls back the statement, which then inserts nothing and takes nothing.
Attach it by: create trigger limited after insert on orders referencing new table as inserted for each statement
  execute function ratelimit_guard(''policy'', ''key column'', ''cost column'').
The key column is of type text, varchar, uuid, integer or bigint, the cost column of type integer or bigint. Without a
  cost column each row costs 1 token.
Each key is charged once, with the sum of its rows. Rows that an upsert updates are not charged. Of a partitioned
  table only the guard of the table that the statement names charges.
Errors: RL429 for a denial, as in ratelimit_enforce. 22023 for a trigger or a column that does not fit and for a key
  or a cost that is out of range, RL001 for an unknown policy.
Locks: the bucket rows, in the order of key, until the transaction ends.
Writes: the buckets.
Role: administrator, to attach the trigger. A role that inserts rows needs no grant.';
