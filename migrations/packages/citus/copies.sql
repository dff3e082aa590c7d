-- Makes the functions of Citus of those that sql/ has made.
--
-- A statement about a distributed table is planned anew at each call inside a function, which costs more than all else. One about the
-- table of a shard costs what it does on plain PostgreSQL. So for each shard of ratelimit.buckets there is a schema ratelimit_<number
-- of the shard> with copies of the functions that name a table, and of those that call these. They differ in the names of tables: of the
-- shards of the same keys, and of the copies of policies and overrides that each node has. Citus puts them on all nodes.
--
-- What callers and guards call is an entry: it finds the shard of the key, and looks whether it is here. If so, it calls a function with _at
-- at the end of its name, which locks what a writer of Citus locks, looks again, and calls the copy. If not, Citus calls the twin of the
-- entry, with _here at the end of its name, on the node that has the shard, which does that. The lock is taken only where the shard is:
-- on two nodes it could be in a deadlock with a move.
--
-- The numbers of shards are in the texts. Who changes them (alter_distributed_table, a split) runs this again; until then calls fail.
do $copies$
declare
  v_path     text := pg_catalog.current_setting('search_path');
  v_home     text := pg_catalog.current_schema();
  v_tables   constant text := '((?:ephemeral_)?(?:buckets|idempotency_keys|slots|leases)|usage|policies|overrides)';
  v_key      constant text[] := '{acquire, peek, refund, reset, pause, hold, renew, release, charge, settle, reserve, acquire_up_to}';
  v_keyed    text[];     -- likewise, and those of schema ratelimit that other functions call
  v_roots    text[];     -- and the others that have copies and that something else calls
  v_ids      bigint[];   -- of the shards of buckets, in the order of the hashes of their keys
  v_mins     integer[];  -- parallel to it: the least hash
  v_rings    text[];     -- likewise: a key that is there
  v_names    text[];     -- the copied functions
  v_calls    text;
  v_seen     constant text := 'select p.ctid from pg_catalog.pg_dist_placement as p join pg_catalog.pg_dist_local_group as g on g.groupid = p.groupid where p.shardid = v_shard';
  v_function record;
  v_shard    record;
  v_text     text;
  v_old      record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  perform set_config('check_function_bodies', 'off', true);  -- the tables of shards are on other nodes, and types are found by the path of the caller
  v_keyed := array(select 'ratelimit_' || k.name from unnest(v_key) as k (name)) || '{acquire, settle, peek, reset}';
  v_roots := v_keyed || '{ratelimit_acquire_all, ratelimit_settle_all, acquire_batch, cleanup_batch}';
  select array_agg(s.shardid order by s.shardminvalue::integer), array_agg(s.shardminvalue::integer order by s.shardminvalue::integer)
    into v_ids, v_mins
    from pg_dist_shard as s
   where s.logicalrelid = 'ratelimit.buckets'::regclass;
  v_rings := array(select (select n.n::text
                             from generate_series(1, 1000000) as n (n)
                            where hashtext(n.n::text collate "C") between s.shardminvalue::integer and s.shardmaxvalue::integer
                            limit 1)
                     from pg_dist_shard as s
                    where s.logicalrelid = 'ratelimit.buckets'::regclass
                    order by s.shardminvalue::integer);

  -- 1. The functions that name a table or call one that does, as far as an entry reaches them.
  create temporary table made on commit drop as
  select p.oid, p.proname::text collate "C" as name, pg_get_functiondef(p.oid) as text,
         length('CREATE OR REPLACE FUNCTION ' || quote_ident(p.pronamespace::regnamespace::text) || '.' || quote_ident(p.proname)) as head,
         regexp_replace(p.prosrc, '--[^\n]*', '', 'g') as body, false as copied
    from pg_proc as p
    join pg_namespace as n on n.nspname = 'ratelimit' and p.proowner = n.nspowner
   where p.prokind = 'f'
     and (p.pronamespace = n.oid or p.pronamespace = v_home::regnamespace and p.proname ~ '^ratelimit_');
  create temporary table calls on commit drop as
  select distinct m.name as caller, c.call[1] collate "C" as callee
    from made as m
   cross join lateral regexp_matches(m.body, '\m(\w+)\(', 'g') as c (call)
   where c.call[1] in (select o.name from made as o where o.name !~ '^ratelimit_');  -- hints name public functions, and nothing calls one
  with recursive about (name) as (
    select m.name from made as m where m.body ~ ('\m(from|join|update|into)\s+(ratelimit\.)?' || v_tables || '( as |\s+\()') or m.name in ('cleanup_batch', 'remove_orphans')
    union
    select c.caller from about as a join calls as c on c.callee = a.name
  ), reached (name) as (
    select r.name collate "C" from unnest(v_roots) as r (name)
    union
    select c.callee from reached as r join calls as c on c.caller = r.name
  )
  select array_agg(a.name) into v_names from about as a join reached as r on r.name = a.name;

  -- 2. Their texts, with marks for the names that differ.
  v_calls := '\m(?:ratelimit\.)?(' || array_to_string(array(select n.name from unnest(v_names) as n (name) where n.name !~ '^ratelimit_'), '|') || ')\(';
  for v_function in select m.* from made as m where m.name = any (v_names) loop
    v_text := substr(v_function.text, v_function.head + 1);
    v_text := regexp_replace(v_text, '^((?:.(?!AS \$function\$))*) SECURITY DEFINER\n', '\1');
    v_text := regexp_replace(v_text, '\n SECURITY DEFINER(?=\n)', '');
    if v_function.name = any (v_keyed) then  -- the entry has the settings
      v_text := regexp_replace(v_text, '\n SET \w+ TO [^\n]*(?=\n)', '', 'g');
    end if;
    v_text := regexp_replace(v_text, '\n SET search_path TO ''ratelimit'', ''pg_temp''(?=\n)', '');
    v_text := regexp_replace(v_text, 'lock table policies in access share mode;', '', 'g');
    v_text := regexp_replace(v_text, 'with due as materialized \(\s+select d\.ctid as row_id, d\.stays from overrides .*?from due;', '', 'g');
    v_text := regexp_replace(v_text, ':= (\w) from (?:ratelimit\.)?(?!policies)' || v_tables || ' as \1\M', ':= row(\1.*)::ratelimit.@row@\2 from \2 as \1', 'g');
    v_text := regexp_replace(v_text, '\((with_override|numbers_by)\(v_policy, o, ', '(\1(v_policy, row(o.*)::ratelimit.@row@overrides, ', 'g');
    v_text := regexp_replace(v_text, '\(select (with_override|numbers_by)\(v_policy, o, ', '(select \1(v_policy, row(o.*)::ratelimit.@row@overrides, ', 'g');
    v_text := regexp_replace(v_text, '\(select p = v_policy from', '(select row(p.*)::ratelimit.@row@policies = v_policy from', 'g');
    v_text := regexp_replace(v_text, '\(select (p|u) from (policies|usage|unnest)\M', '(select row(\1.*)::ratelimit.@row@\2 from \2', 'g');
    v_text := replace(v_text, '@row@unnest', '@row@policies');
    v_text := regexp_replace(v_text, '\mrow\((u\.n, )?p, ', 'row(\1row(p.*)::ratelimit.@row@policies, ', 'g');
    v_text := regexp_replace(v_text, '\m(from|join|update|into)(\s+)(?:ratelimit\.)?' || v_tables || '(?= as |\s+\()', '\1\2ratelimit.\3_@\3@', 'g');
    v_text := regexp_replace(v_text, '\mconstraint ' || v_tables || '_pkey\M', 'constraint \1_pkey_@\1@', 'g');
    if v_function.name in ('cleanup_batch', 'remove_orphans') then
      v_text := regexp_replace(v_text, '''' || v_tables || '''(?=, )', '''ratelimit.\1_@\1@''', 'g');
    end if;
    v_text := replace(v_text, '@row@', '');
    v_text := regexp_replace(v_text, v_calls, 'ratelimit_@buckets@.\1(', 'g');
    update made as m set text = format('create or replace function ratelimit_@buckets@.%I', v_function.name) || v_text, copied = true where m.oid = v_function.oid;
  end loop;
  select m.name into v_text from made as m
   where m.copied
     and regexp_replace(m.text, '--[^\n]*', '', 'g') ~ ('\m(from|update|into|join|only|using|table)\s+(ratelimit\.)?' || v_tables || '\M(?!,)|\m' || v_tables || '_pkey\M');
  if v_text is not null then
    raise exception 'a copy would be about a table of all shards'
      using errcode = '42P16', detail = format('It is %s.', v_text), hint = 'migrations/packages/citus knows the statements that it changes.';
  end if;

  -- 3. The copies, and types that only bodies name.
  execute 'create or replace function ratelimit.types_of_bodies(ratelimit.part, ratelimit.element) returns void language sql as $$ select $$';
  for v_shard in
    select s.shardid as id, format('ratelimit_%s', s.shardid) as schema,
           array_agg(array[c.relname::text, o.shardid::text]) as tables
      from pg_dist_shard as s
      join pg_dist_shard as o on o.shardminvalue = s.shardminvalue or o.shardminvalue is null
      join pg_class as c on c.oid = o.logicalrelid and c.relnamespace = 'ratelimit'::regnamespace
     where s.logicalrelid = 'ratelimit.buckets'::regclass
     group by s.shardid
     order by s.shardid
  loop
    execute format('create schema if not exists %I', v_shard.schema);
    if (select c.nspowner from pg_namespace as c where c.nspname = v_shard.schema) <> (select r.nspowner from pg_namespace as r where r.nspname = 'ratelimit') then
      raise exception 'a schema of another role has the name of a shard'  -- its owner could put other functions there
        using errcode = '42501', detail = format('It is %I.', v_shard.schema), hint = 'Drop or rename it.';
    end if;
    for v_text in
      select p.oid::regprocedure
        from pg_proc as p
       where p.pronamespace = v_shard.schema::regnamespace
         and not exists (select
                           from made as m
                          where m.copied
                            and m.name = p.proname
                            and pg_get_function_identity_arguments(m.oid) = pg_get_function_identity_arguments(p.oid)
                            and pg_get_function_result(m.oid) = pg_get_function_result(p.oid))
    loop
      execute format('drop function %s', v_text);
    end loop;
    for v_function in select m.* from made as m where m.copied order by m.name loop
      v_text := v_function.text;
      for v_n in 1..cardinality(v_shard.tables) / 2 loop
        v_text := replace(v_text, '@' || v_shard.tables[v_n][1] || '@', v_shard.tables[v_n][2]);
      end loop;
      execute v_text;
    end loop;
  end loop;
  for v_old in
    select n.nspname from pg_namespace as n where n.nspname ~ '^ratelimit_[0-9]+$' and substr(n.nspname, 11)::bigint <> all (v_ids)
  loop
    for v_text in select p.oid::regprocedure from pg_proc as p where p.pronamespace = v_old.nspname::regnamespace loop
      execute format('drop function %s', v_text);
    end loop;
    execute format('drop schema %I', v_old.nspname);
  end loop;

  -- To share a row of a reference table Citus takes two locks one after the other, of which each keeps others from the second: two calls
  -- at once would be a deadlock.
  for v_text in select m.text from made as m where m.body ~ ' for key share;' loop
    execute replace(v_text, ' for key share;', ' for no key update;');
  end loop;

  -- 4. What entries ask.
  execute format($text$
    create or replace function ratelimit.shard_of(key text) returns bigint language sql immutable parallel safe
    as $$ select (%L::bigint[])[width_bucket(hashtext(key collate "C"), %L::integer[])] $$;
    comment on function ratelimit.shard_of(text) is 'The number of the shard that has a key.';
    create or replace function ratelimit.ring_of(shard bigint) returns text language sql immutable parallel safe
    as $$ select (%L::text[])[array_position(%L::bigint[], shard)] $$;
    comment on function ratelimit.ring_of(bigint) is 'A key that a shard has.';
  $text$, v_ids, v_mins, v_rings, v_ids);

  -- 5. The choice of a copy, with the lock; the twins of entries; the entries about one key.
  for v_function in
    select m.name, m.name ~ '^ratelimit_' as is_public, p.pronamespace::regnamespace::text as schema, o.own, a.outs,
           coalesce((select string_agg(E'\n  set ' || replace(c.setting, '=', ' = '), '' order by c.n) from unnest(p.proconfig) with ordinality as c (setting, n)), '') as settings,
           pg_get_function_arguments(p.oid) as arguments, pg_get_function_identity_arguments(p.oid) as identity, pg_get_function_result(p.oid) as result,
           case p.provolatile when 's' then 'stable' else 'volatile' end as volatility,
           -- the arguments, as the copy, the twin and the function _at get them
           a.passed, replace(a.passed, o.own || '_at.', o.own || '_here.') as received,
           replace(a.passed, o.own || '_at.', m.name || '.') as given,
           regexp_replace(replace(a.passed, o.own || '_at.', m.name || '.'), '\m' || m.name || '\.key\M', 'v_key') as sent
      from made as m
      join pg_proc as p on p.oid = m.oid
     cross join lateral (select regexp_replace(m.name, '^ratelimit_', '') as own) as o
     cross join lateral (select string_agg(format('%I.%I', o.own || '_at', a.name), ', ' order by a.n) filter (where a.mode in ('i', 'b')) as passed,
                                string_agg(format('%I.%I', o.own || '_at', a.name), ', ' order by a.n) filter (where a.mode in ('o', 'b')) as outs
                           from unnest(p.proargnames, coalesce(p.proargmodes, array_fill('i'::"char", array[p.pronargs]))) with ordinality as a (name, mode, n)) as a
     where m.name = any (v_roots)
     order by m.name
  loop
    execute format($text$
create or replace function ratelimit.%1$I(shard bigint, seen tid, %2$s)
  returns %3$s
  language plpgsql
  %4$s
as $at$
begin
%7$s  perform pg_catalog.lock_shard_metadata(5, array[shard]);
  if pg_catalog.currtid2('pg_catalog.pg_dist_placement', seen) <> seen  -- the newest version, whatever the snapshot
     or pg_catalog.get_shard_id_for_distribution_column('ratelimit.buckets', ratelimit.ring_of(shard)) <> shard then
    perform ratelimit.refuse_shard(shard);
  end if;
  case shard
%5$s
    else perform ratelimit.refuse_shard(null);
  end case;
end;
$at$;
comment on function ratelimit.%1$I(bigint, tid, %2$s) is 'What %6$I does, on a shard that is here; seen is the row of its placement.'$text$,
      v_function.own || '_at', v_function.identity, v_function.result, v_function.volatility,
      (select string_agg(format(case when v_function.outs is not null then '    when %1$s then select d.* into %4$s from ratelimit_%1$s.%2$I(%3$s) as d;'
                                     when v_function.result = 'void' then '    when %1$s then perform ratelimit_%1$s.%2$I(%3$s);'
                                     else '    when %1$s then return ratelimit_%1$s.%2$I(%3$s);' end,
                                i.id, v_function.name, v_function.passed, v_function.outs), E'\n' order by i.n)
         from unnest(v_ids) with ordinality as i (id, n)), v_function.name,
      case when v_function.volatility = 'volatile' then $join$  if (pg_catalog.get_current_transaction_id()).transaction_number = 0 then
    perform ratelimit.join_citus();
  elsif pg_catalog.current_setting('ratelimit.elsewhere', true) = 'on' then
    perform ratelimit.commit_together(ratelimit.ring_of(shard));
  end if;
$join$ else '' end);
    if v_function.is_public then
      execute format($text$
create or replace function ratelimit.%1$I(%2$s)
  returns %3$s
  language plpgsql
  volatile%7$s
as $here$
declare
  v_shard bigint := ratelimit.shard_of(%1$I.key);
  v_seen  tid    := (%4$s);
begin
  if v_seen is null%8$s then perform ratelimit.refuse_shard(v_shard); end if;
  %5$s;
end;
$here$;
comment on function ratelimit.%1$I(%2$s) is 'What %6$I does, on the node that has the shard of the key.'$text$,
        v_function.own || '_here',
        case when v_function.name = any (v_keyed) then '' else 'key text, ' end || v_function.identity,  -- of a call about several keys: any key there
        v_function.result, v_seen,
        format(case when v_function.outs is not null then 'select d.* into %3$s from ratelimit.%1$I(v_shard, v_seen, %2$s) as d'
                    when v_function.result = 'void' then 'perform ratelimit.%1$I(v_shard, v_seen, %2$s)'
                    else 'return ratelimit.%1$I(v_shard, v_seen, %2$s)' end,
               v_function.own || '_at', v_function.received, replace(v_function.outs, v_function.own || '_at.', v_function.own || '_here.')),
        v_function.name, v_function.settings,
        case when v_function.volatility = 'volatile' then ' or ratelimit.has_left()' else '' end);
    end if;
    continue when v_function.name <> all (v_keyed);
    execute format($text$
create or replace function %1$s.%2$I(%3$s)
  returns %4$s
  language plpgsql
  %5$s%6$s
as $entry$
declare
  v_key   text collate "C" := %2$I.key;
  v_shard bigint := ratelimit.shard_of(v_key);
  v_seen  tid;
%7$sbegin
  if v_key is null then  -- Citus would find no shard, and Citus 13.2 crashes where a distributed function is called with null
    perform ratelimit.check_name('policy', %8$s);
    perform ratelimit.check_name('key', v_key);
  end if;
%9$s  v_seen := (%10$s);
  if v_seen is not null then
    %11$s
  else
    %13$s%12$s
  end if;
end;
$entry$$text$,
      v_function.schema, v_function.name, v_function.arguments, v_function.result, v_function.volatility,
      case when v_function.is_public then E'\n  security definer' || v_function.settings else '' end,
      case when v_function.result = 'void' then '' else format(E'  v_answer %s;\n', v_function.result) end,
      v_function.name || case when v_function.arguments ~ '^v_policy' then '.v_policy.name' else '.policy' end,
      case v_function.name  -- not every interval can be read again at the other node
        when 'ratelimit_reserve' then $check$  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.check_request(policy, key, cost, idempotency_key);
    perform ratelimit.check_max_wait(max_wait);
  end if;
$check$
        when 'ratelimit_pause' then $check$  perform ratelimit.check_pause(policy, key, pause_for);
$check$
        else '' end,
      v_seen,
      format(case when v_function.result = 'void' then 'perform ratelimit.%I(v_shard, v_seen, %s);' else 'return ratelimit.%I(v_shard, v_seen, %s);' end,
             v_function.own || '_at', v_function.given),
      format(case when v_function.result = 'void' then 'perform d.* from ratelimit.%I(%s) as d;'
                  else E'select d.* into v_answer from ratelimit.%I(%s) as d;\n    return v_answer;' end,
             v_function.own || '_here', replace(v_function.sent, v_function.name || '.v_policy', v_function.name || '.v_policy.name')),
      case when v_function.volatility = 'volatile' then E'perform ratelimit.leave_node();\n    ' else '' end);
  end loop;
  perform set_config('check_function_bodies', 'on', true);
  perform set_config('search_path', v_path, true);
end;
$copies$;

-- The entries about many keys.

create or replace function ratelimit.seen_here(shard bigint)
  returns tid language sql stable
as $$
  select p.ctid
    from pg_catalog.pg_dist_placement as p
    join pg_catalog.pg_dist_local_group as g on g.groupid = p.groupid
   where p.shardid = shard
$$;
comment on function ratelimit.seen_here(bigint) is
  'The row of the placement of a shard on this node; null: it is on another.';

-- Gives the transaction an id of Citus, which keeps it until it ends, as its writers in functions have. To the search for deadlocks all
-- transactions of a node without one are the same (https://github.com/citusdata/citus/issues/1803): a call from another node that waits for
-- one of them, while another of them waits for the call, would fail with 40P01.
create or replace function ratelimit.join_citus()
  returns void
  language plpgsql
  volatile
as $$
begin
  perform pg_catalog.create_intermediate_result('', '');  -- begins with the id, and then refuses a text without a query
exception
  when internal_error then null;
end;
$$;
comment on function ratelimit.join_citus() is
  'Gives the transaction an id that the search of Citus for deadlocks can tell from others.';

-- Citus knows nothing of what a copy writes, and so would commit the transaction of another node before this one's. Who writes on this node
-- and on another has Citus prepare both, by a statement of Citus that writes nothing: about this shard, or without a key about none.
create or replace function ratelimit.commit_together(key text)
  returns void
  language plpgsql
  volatile
as $$
begin
  if pg_catalog.current_setting('transaction_read_only') = 'on' then return; end if;
  delete from ratelimit.buckets as b where b.key = commit_together.key and b.policy_id = 0;
  if commit_together.key is not null then perform pg_catalog.set_config('ratelimit.elsewhere', 'done', true); end if;
end;
$$;
comment on function ratelimit.commit_together(text) is
  'Has a transaction commit on all nodes or on none.';

create or replace function ratelimit.leave_node()
  returns void
  language plpgsql
  volatile
as $$
begin
  if pg_catalog.current_setting('ratelimit.elsewhere', true) = 'done' then return; end if;
  if pg_catalog.pg_current_xact_id_if_assigned() is not null then perform ratelimit.commit_together(null); end if;
  perform pg_catalog.set_config('ratelimit.elsewhere', 'on', true);
end;
$$;
comment on function ratelimit.leave_node() is
  'Called before a call on another node.';

-- Whether this session has called on another node. If Citus then calls the function of the node that has a shard in this session, the
-- shard has come meanwhile, and the statement of commit_together would fail: Citus allows none but about the key of that call.
create or replace function ratelimit.has_left()
  returns boolean language sql stable
as $$
  select pg_catalog.current_setting('ratelimit.elsewhere', true) <> ''
$$;
comment on function ratelimit.has_left() is
  'Whether the transaction has called on another node.';

create or replace function ratelimit_node(key text)
  returns text
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select n.nodename || ':' || n.nodeport
    from pg_catalog.pg_dist_placement as p
    join pg_catalog.pg_dist_node as n on n.groupid = p.groupid
   where p.shardid = shard_of(ratelimit_node.key)
     and n.noderole = 'primary'
$$;
comment on function ratelimit_node(text) is
'The node that has the buckets of a key, as host:port; only on Citus. A call about the key costs least there, and is right on any node.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: application.';

create or replace function ratelimit_nodes()
  returns table (from_hash integer, host text, port integer)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select s.shardminvalue::integer, n.nodename::text, n.nodeport
    from pg_catalog.pg_dist_shard as s
    join pg_catalog.pg_dist_placement as p on p.shardid = s.shardid
    join pg_catalog.pg_dist_node as n on n.groupid = p.groupid
   where s.logicalrelid = 'ratelimit.buckets'::pg_catalog.regclass
     and n.noderole = 'primary'
$$;
comment on function ratelimit_nodes() is
'The node of each shard; only on Citus. A shard has the keys whose hashtext is from_hash or more, and less than that of the next.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: application.';

create or replace function ratelimit.refuse_shard(shard bigint)
  returns void language plpgsql stable
as $$
begin
  if exists (select from pg_catalog.pg_dist_shard as s where s.shardid = shard and s.logicalrelid = 'ratelimit.buckets'::pg_catalog.regclass) then
    raise exception 'the shard has moved' using
      errcode = 'XX000',
      detail  = format('Shard %s was on another node a moment ago, or is now.', shard),
      hint    = 'Nothing was taken. Repeat the call in a new transaction.';
  end if;
  raise exception 'the shards have changed' using
    errcode = '55000',
    detail  = 'The functions were made for other shards.',
    hint    = 'Nothing was taken. Run make install-citus, or citus.sql of the release.';
end;
$$;
comment on function ratelimit.refuse_shard(bigint) is
  'Fails because a shard is not where it was.';

-- A batch of which all keys are in one shard.
create or replace function ratelimit.acquire_batch_on(
    shard bigint, policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
as $$
declare
  v_seen   tid := seen_here(shard);
  v_ring   text collate "C";
  v_answer ratelimit.packed;
begin
  if v_seen is not null then
    return acquire_batch_at(shard, v_seen, policies, keys, costs, sizes, idempotency_keys);
  end if;
  perform leave_node();
  v_ring := ring_of(shard);
  select d.* into v_answer from ratelimit.acquire_batch_here(v_ring, shard, policies, keys, costs, sizes, idempotency_keys) as d;
  return v_answer;
end;
$$;
comment on function ratelimit.acquire_batch_on(bigint, text[], text[], bigint[], integer[], text[]) is
  'Decides a batch of one shard, wherever that is.';

create or replace function ratelimit.acquire_batch_here(
    key text, shard bigint, policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
as $$
declare
  v_seen tid := seen_here(shard);
begin
  if v_seen is null or has_left() then perform refuse_shard(shard); end if;
  return acquire_batch_at(shard, v_seen, policies, keys, costs, sizes, idempotency_keys);
end;
$$;
comment on function ratelimit.acquire_batch_here(text, bigint, text[], text[], bigint[], integer[], text[]) is
  'Decides a batch of one shard, on the node that has it; key is any key there.';

-- Decides many requests, as if each were asked on its own, one after another: those of one shard in one call, in the order of the
-- shards. A request whose elements have several keys is refused with 0A000, because its buckets may be on several
-- nodes. acquire_packed.sql explains the arguments and the results.
create or replace function ratelimit.acquire_batch(
    policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
as $$
declare
  v_first    bigint;
  v_last     bigint;
  v_requests bigint[];  -- for each element, the number of its request
  v_misfits  bigint[];  -- requests of a size that is refused
  v_part     record;
  v_error    record;
  v_one      ratelimit.packed;
  v_answers  ratelimit.packed;
begin
  select min(shard_of(u.key)), max(shard_of(u.key)) into v_first, v_last from unnest(keys) as u (key);
  if v_first is not distinct from v_last and (sizes is null or keys[1] collate "C" = all (keys)) then
    return acquire_batch_on(coalesce(v_first, shard_of('')), policies, keys, costs, sizes, idempotency_keys);
  end if;
  select f.policies, f.keys, f.costs, f.sizes, f.idempotency_keys, coalesce(f.requests, array(select generate_series(1, cardinality(f.policies)))), f.misfits
    into policies, keys, costs, sizes, idempotency_keys, v_requests, v_misfits
    from batch_form(policies, keys, costs, sizes, idempotency_keys) as f;

  -- Requests with several keys, or with one and none: the first bad element is their error.
  if sizes is not null then
    for v_part in
      select r.request, r.elements, r.place - r.first + 1 as element, e.policy, e.key, e.cost, e.idempotency_key, e.bad
        from (select u.request, bool_or(u.key is null) or count(distinct u.key collate "C") > 1 as strays,
                     coalesce(min(u.place) filter (where u.bad), min(u.place)) as place, min(u.place) as first, count(*) as elements
                from (select q.*, (acceptable(q.key, q.cost) and is_name(q.policy) and is_name(q.idempotency_key) is not false) is not true as bad
                        from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
                             with ordinality as q (policy, key, cost, request, idempotency_key, place)) as u
               group by u.request) as r
       cross join lateral (select acquire_batch.policies[r.place] as policy, acquire_batch.keys[r.place] as key, acquire_batch.costs[r.place] as cost,
                                  acquire_batch.idempotency_keys[r.place] as idempotency_key,
                                  (acceptable(acquire_batch.keys[r.place], acquire_batch.costs[r.place]) and is_name(acquire_batch.policies[r.place])
                                   and is_name(acquire_batch.idempotency_keys[r.place]) is not false) is not true as bad) as e
       where r.strays
       order by r.request
    loop
      if v_part.bad then
        select f.* into v_error from refusal(v_part.policy, v_part.key, v_part.cost, v_part.idempotency_key, null) as f;
        v_error.error_detail := detail_of_element(v_error.error_message, v_error.error_detail, v_part.element, v_part.elements);
      else
        select '0A000' as error_code, 'the buckets of a request must have one key' as error_message,
               format('The keys of request %s may be on several nodes.', v_part.request) as error_detail,
               'Ask for several limits under one key and several policies, or ask for each alone.' as error_hint
          into v_error;
      end if;
      v_answers.refused        := v_answers.refused || v_part.request;
      v_answers.error_codes    := v_answers.error_codes || v_error.error_code;
      v_answers.error_messages := v_answers.error_messages || v_error.error_message;
      v_answers.error_details  := v_answers.error_details || v_error.error_detail;
      v_answers.error_hints    := v_answers.error_hints || v_error.error_hint;
    end loop;
  end if;

  for v_part in
    select u.shard, array_agg(u.policy) as policies, array_agg(u.key) as keys, array_agg(u.cost) as costs, array_agg(u.place) as places,
           array_agg(u.request) filter (where u.is_first) as requests,
           case when acquire_batch.sizes is not null then array_agg(acquire_batch.sizes[u.request]) filter (where u.is_first) end as sizes,
           case when acquire_batch.idempotency_keys is not null then array_agg(u.idempotency_key) filter (where u.is_first) end as idempotency_keys
      from (select coalesce(shard_of(q.key), v_first) as shard, q.*, v_requests[q.place - 1] is distinct from q.request as is_first
              from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
                   with ordinality as q (policy, key, cost, request, idempotency_key, place)
             where (q.request = any (v_answers.refused)) is not true and (q.request = any (v_misfits)) is not true
             order by 1, q.place) as u
     group by u.shard
     order by u.shard
  loop
    v_one := acquire_batch_on(v_part.shard, v_part.policies, v_part.keys, v_part.costs, v_part.sizes, v_part.idempotency_keys);
    v_answers.replayed := case when v_answers.replayed is not null or v_one.replayed is not null then
      coalesce(v_answers.replayed, array_fill(false, array[coalesce(cardinality(v_answers.elements), 0)]))
      || coalesce(v_one.replayed, array_fill(false, array[coalesce(cardinality(v_one.elements), 0)])) end;
    v_answers.shadowed := case when v_answers.shadowed is not null or v_one.shadowed is not null then
      coalesce(v_answers.shadowed, array_fill(false, array[coalesce(cardinality(v_answers.elements), 0)]))
      || coalesce(v_one.shadowed, array_fill(false, array[coalesce(cardinality(v_one.elements), 0)])) end;
    v_answers.elements          := v_answers.elements || array(select v_part.places[u.n] from unnest(v_one.elements) with ordinality as u (n, o) order by u.o);
    v_answers.remaining         := v_answers.remaining || v_one.remaining;
    v_answers.retry_after_us    := v_answers.retry_after_us || v_one.retry_after_us;
    v_answers.reset_after_us    := v_answers.reset_after_us || v_one.reset_after_us;
    v_answers.capacity          := v_answers.capacity || v_one.capacity;
    if v_one.requests is not null then
      v_answers.requests          := v_answers.requests || array(select v_part.requests[u.n] from unnest(v_one.requests) with ordinality as u (n, o) order by u.o);
      v_answers.requests_allowed  := v_answers.requests_allowed || v_one.requests_allowed;
      v_answers.requests_replayed := v_answers.requests_replayed || v_one.requests_replayed;
      v_answers.requests_shadowed := v_answers.requests_shadowed || v_one.requests_shadowed;
      v_answers.bindings          := v_answers.bindings || v_one.bindings;
    end if;
    if v_one.refused is not null then
      v_answers.refused        := v_answers.refused || array(select v_part.requests[u.n] from unnest(v_one.refused) with ordinality as u (n, o) order by u.o);
      v_answers.error_codes    := v_answers.error_codes || v_one.error_codes;
      v_answers.error_messages := v_answers.error_messages || v_one.error_messages;
      v_answers.error_details  := v_answers.error_details || v_one.error_details;
      v_answers.error_hints    := v_answers.error_hints || v_one.error_hints;
    end if;
  end loop;
  if v_misfits is not null then
    v_answers := with_misfits(v_answers, sizes, v_misfits);
  end if;
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';

create or replace function ratelimit_acquire_all(
    in  policies        text[],
    in  keys            text[],
    in  costs           bigint[] default null,
    in  idempotency_key text     default null,
    out allowed         boolean,
    out remaining       bigint,
    out retry_after     interval,
    out reset_after     interval,
    out capacity        bigint,
    out replayed        boolean,
    out shadowed        boolean,
    out binding         integer,
    out decisions       ratelimit.decision[])
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key   text collate "C";
  v_last  text collate "C";
  v_shard bigint;
  v_seen  tid;
begin
  select min(u.key collate "C"), max(u.key collate "C") into v_key, v_last from unnest(keys) as u (key);
  if v_key <> v_last and cardinality(policies) between 1 and 1000 then
    perform acquire_all_in_batch(policies, keys, costs, idempotency_key);  -- which refuses it
  end if;
  v_key   := coalesce(v_key, '');
  v_shard := shard_of(v_key);
  v_seen  := seen_here(v_shard);
  if v_seen is not null then
    select d.* into allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, binding, decisions
      from acquire_all_at(v_shard, v_seen, policies, keys, costs, idempotency_key) as d;
  else
    perform leave_node();
    select d.* into allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, binding, decisions
      from ratelimit.acquire_all_here(v_key, policies, keys, costs, idempotency_key) as d;
  end if;
end;
$$;

create or replace function ratelimit_settle_all(
    in  policies        text[],
    in  keys            text[],
    in  idempotency_key text,
    in  costs           bigint[],
    out replayed        boolean,
    out decisions       ratelimit.decision[])
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key   text collate "C" := coalesce((select min(u.key collate "C") from unnest(keys) as u (key)), '');
  v_shard bigint := shard_of(v_key);
  v_seen  tid    := seen_here(v_shard);
begin
  if v_seen is not null then
    select d.* into replayed, decisions from settle_all_at(v_shard, v_seen, policies, keys, idempotency_key, costs) as d;
  else
    perform leave_node();
    select d.* into replayed, decisions from ratelimit.settle_all_here(v_key, policies, keys, idempotency_key, costs) as d;
  end if;
end;
$$;

-- One batch of clean-up of the shards that this node has. cleanup_batch calls it on every node, in a transaction of its own. The answer is
-- how many buckets and idempotency keys were deleted, and whether a shard has more.
create or replace function ratelimit.cleanup_here(max_rows integer, budget interval, due_before timestamptz)
  returns bigint[]
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
as $$
declare
  v_shard  record;
  v_one    record;
  v_counts bigint[] := '{0,0,0}';
begin
  for v_shard in
    select s.id, s.seen
      from (select s.shardid as id, seen_here(s.shardid) as seen from pg_catalog.pg_dist_shard as s where s.logicalrelid = 'ratelimit.buckets'::regclass) as s
     where s.seen is not null
     order by random()
  loop
    v_one    := cleanup_batch_at(v_shard.id, v_shard.seen, max_rows, budget, due_before, null);
    v_counts := array[v_counts[1] + v_one.buckets_deleted, v_counts[2] + v_one.idempotency_keys_deleted, v_counts[3] + v_one.more::integer];
  end loop;
  return v_counts;
end;
$$;
comment on function ratelimit.cleanup_here(integer, interval, timestamptz) is
  'One batch of clean-up of the shards of this node.';

-- One batch of each node, and of the overrides; the arguments and results are those that sql/cleanup_batch.sql explains. The batch
-- of a node is a transaction of its own, and is at most max_rows rows of each shard. A node that cannot be reached is left out,
-- with a warning.
-- Locks and writes: as cleanup_here on all nodes; overrides of which a part has ended.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    in    budget                   interval,
    inout due_before               timestamptz,
    inout deadline                 timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   more                     boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set datestyle = 'ISO'
as $$
declare
  v_now    timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_node   record;
  v_counts bigint[];
begin
  perform check_max_rows(max_rows);
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  more                     := false;
  for v_node in
    select * from run_command_on_all_nodes(format('select ratelimit.cleanup_here(%s, ''1 year'', %L)', max_rows, due_before),
                                           parallel => true, give_warning_for_connection_errors => true)
  loop
    if not v_node.success then
      raise warning 'a node was not cleaned up' using detail = format('Node %s: %s', v_node.nodeid, v_node.result);
      continue;
    end if;
    v_counts                 := v_node.result::bigint[];
    buckets_deleted          := buckets_deleted + v_counts[1];
    idempotency_keys_deleted := idempotency_keys_deleted + v_counts[2];
    more                     := more or v_counts[3] > 0;
  end loop;
  if exists (select from overrides as o where o.expires_at <= due_before) then
    delete from overrides as o where o.expires_at <= due_before and not o.stays;
    update overrides as o
       set expires_at = null, ending_capacity = null, ending_refill = null, ending_every = null, ending_lease = null
     where o.expires_at <= due_before;
    more := true;
  end if;
  more := more and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up on all nodes, and whether another should follow.';
