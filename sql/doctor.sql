-- The owners are those of schema ratelimit, its functions and tables, the public functions and the extension. A restore by a
-- superuser makes it the owner of an extension, because pg_dump does not name the owner.
--
-- A bucket that is overdue and in use is no finding: clean-up skips a row that is locked.
create or replace function ratelimit_doctor()
  returns table (severity text, finding text, remedy text)
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- the overdue rows are found by the index of the column that makes them due
  set jit = off             -- a sequential scan, where there is no other way, now counts as dear enough to be compiled
as $$
declare
  v_now        timestamptz;
  v_due_before timestamptz;
  v_tables     regclass[];
  v_standby    constant boolean     := pg_is_in_recovery();
  v_where      constant text        := case when v_standby then ' This server is a standby: do it on the primary.' else '' end;
  v_home       constant regnamespace := (select p.pronamespace::regnamespace
                                           from pg_proc as p
                                          where p.proname = 'ratelimit_doctor'
                                            and p.pronargs = 0
                                            and pg_get_userbyid(p.proowner) = current_user
                                          limit 1);
  -- The owner of schema ratelimit or, where that is a superuser and not the owner of this function, the latter.
  v_owner      constant oid         := (select r.oid
                                          from pg_roles as r
                                         where r.rolname = current_user
                                            or r.oid = (select n.nspowner from pg_namespace as n where n.nspname = 'ratelimit')
                                         order by r.rolsuper, r.rolname = current_user
                                         limit 1);
  v_new_owner  constant text        := (select case when r.rolsuper then 'new_owner' else r.oid::regrole::text end from pg_roles as r where r.oid = v_owner);
  v_extend     constant text        := (select format(e'\n'
      '  execute format(''set local role %%s'', new_owner);\n'
      '  create extension pgratelimit schema %s version ''unpackaged'';\n'
      '  alter extension pgratelimit update to %L;', v_home, e.extversion)
                                          from pg_extension as e
                                         where e.extname = 'pgratelimit');
  v_object     record;
  v_remedy     text;
  v_blind      boolean := false;
  v_requests   constant text        := (select c.relname::text  -- a table of docs/postgrest/install.sql
                                          from pg_class as c
                                         where c.relnamespace = 'ratelimit'::regnamespace
                                           and c.relname = 'pre_request'
                                           and has_schema_privilege(c.relnamespace, 'usage'));
begin
  -- Objects of superusers can be given away together. What any other role owns may have been planted.
  for v_object in
    select o.owner, r.rolsuper as superuser, bool_or(o.definer) as definer, count(*) as objects,
           bool_or(o.class <> 'pg_extension'::regclass and coalesce(i.schema, 'ratelimit') = 'ratelimit') as private,
           string_agg(format('alter %s %s owner to %s;', replace(i.type, 'composite ', ''), i.identity, v_owner::regrole), e'\n' order by i.identity)
             filter (where o.class <> 'pg_extension'::regclass) as statements
      from (select 'pg_namespace'::regclass, n.oid, n.nspowner, false from pg_namespace as n where n.nspname = 'ratelimit'
            union all
            select 'pg_extension'::regclass, e.oid, e.extowner, false from pg_extension as e where e.extname = 'pgratelimit'
            union all
            select 'pg_class'::regclass, c.oid, c.relowner, false
              from pg_class as c
             where c.relnamespace = 'ratelimit'::regnamespace
               and c.relkind in ('r', 'p', 'v', 'm', 'f', 'c')
            union all
            select 'pg_proc'::regclass, p.oid, p.proowner, p.prosecdef
              from pg_proc as p
             where p.pronamespace = 'ratelimit'::regnamespace
                or p.pronamespace = v_home
               and starts_with(p.proname, 'ratelimit_')) as o (class, oid, owner, definer)
      join pg_roles as r on r.oid = o.owner
     cross join pg_identify_object(o.class, o.oid, 0) as i
     group by o.owner, r.rolsuper
     order by o.owner::regrole::text
  loop
    v_remedy := format('Give them to %s. What may have been planted, drop. As a superuser:%s', v_owner::regrole, v_where) || e'\n' || v_object.statements;
    if v_object.superuser or v_object.statements is null then  -- the extension alone
      -- No statement changes the owner of an extension: so its objects leave it, and the new owner makes it again.
      v_remedy := 'Unless this is a trial, give the package to a role that is no superuser, and has CREATE on the database and on the '
                  'schema of the functions. As a superuser, with the name of that role for ' || v_new_owner || ':' || v_where || format(
$give$
do $give_away$
declare
  new_owner constant regrole := %1$L;
  statement text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  foreach statement in array array(
    select format('alter extension pgratelimit drop %%s %%s', i.type, i.identity)
      from pg_extension as e
      join pg_depend as d on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e'
     cross join pg_identify_object(d.classid, d.objid, 0) as i
     where e.extname = 'pgratelimit'
    union all
    select 'drop extension if exists pgratelimit'
    union all
    select format('alter %%s %%s owner to %%s', replace(i.type, 'composite ', ''), i.identity, new_owner)
      from (select 'pg_namespace'::regclass, oid, nspowner from pg_namespace where nspname = 'ratelimit'
            union all
            select 'pg_class'::regclass, oid, relowner
              from pg_class
             where relnamespace = 'ratelimit'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f', 'c')
            union all
            select 'pg_proc'::regclass, oid, proowner
              from pg_proc
             where pronamespace = 'ratelimit'::regnamespace
                or pronamespace = %2$L::regnamespace and starts_with(proname, 'ratelimit_')) as o (class, oid, owner)
      join pg_roles as r on r.oid = o.owner and r.rolsuper
     cross join pg_identify_object(o.class, o.oid, 0) as i)
  loop
    execute statement;
  end loop;%3$s
end;
$give_away$;$give$, v_new_owner, v_home, v_extend);
    end if;
    if v_object.superuser and v_object.definer then
      return query
        select 'notice',
               format('The owner of the package, %s, is a superuser: its functions run with all rights, whoever calls them.', v_object.owner::regrole),
               v_remedy;
    end if;
    if v_object.owner <> v_owner then
      return query
        select 'warning',
               format('%s objects of the package belong to %s, and others to %s: calls can fail, and no role can upgrade it.', v_object.objects,
                      v_object.owner::regrole, v_owner::regrole),
               v_remedy;
      v_blind := v_blind or v_object.private and not (select r.rolsuper from pg_roles as r where r.rolname = current_user);
    end if;
  end loop;
  if v_blind then
    return;  -- the rest would fail: the owner of this function lacks rights
  end if;

  v_now := clock();
  v_due_before := v_now - interval '10 minutes';
  v_tables := array['buckets'::regclass, 'ephemeral_buckets'::regclass, 'slots'::regclass, 'ephemeral_slots'::regclass,
                    'leases'::regclass, 'ephemeral_leases'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass, 'usage'::regclass];
  return query
  select 'warning',
         format('ratelimit.%s has %s overdue for clean-up, the oldest since %s.', o.name,
                case when o.overdue = 10000 then '10000 or more rows' else counted(o.overdue, 'row') end, date_trunc('second', o.since)),
         'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
    from (select 'buckets' as name, count(*) as overdue, min(d.due) as since
            from (select t.due_at as due from buckets as t where t.due_at < v_due_before and t.refilled_at < v_due_before order by t.due_at limit 10000) as d
          union all
          select 'idempotency_keys' as name, count(*) as overdue, min(d.due) as since
            from (select t.expires_at as due from idempotency_keys as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d
          union all
          select 'slots' as name, count(*) as overdue, min(d.due) as since
            from (select t.due_at as due from slots as t where t.due_at < v_due_before order by t.due_at limit 10000) as d
          union all
          select 'overrides' as name, count(*) as overdue, min(d.due) as since
            from (select t.expires_at as due from overrides as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d
          union all
          select 'usage' as name, count(*) as overdue, min(d.due) as since
            from (select t.expires_at as due from usage as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d) as o
   where o.overdue > 0;
  return query
  select 'warning', format('Policy %L has periods that are over and not closed, the oldest since %s.', o.name, date_trunc('second', min(o.since))),
         'An invoice would lack them. Run clean-up now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
    from (select p.name, (turns_of((numbers_of_key(row(p.*)::policies, b.key, v_now)).policy, b.refilled_at)).turns_at as since
            from (select t.policy_id, t.key, t.refilled_at from buckets as t where t.due_at < v_due_before and t.level < 0 order by t.due_at limit 10000) as b
            join policies as p on p.id = b.policy_id and p.history <> interval '0'
          offset 0) as o
   where o.since < v_due_before
   group by o.name;
  if not v_standby then
    return query
    select 'warning',
           format('ratelimit.%s has %s overdue for clean-up, the oldest since %s.', o.name,
                  case when o.overdue = 10000 then '10000 or more rows' else counted(o.overdue, 'row') end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select 'ephemeral_buckets' as name, count(*) as overdue, min(d.due) as since
              from (select t.due_at as due from ephemeral_buckets as t where t.due_at < v_due_before and t.refilled_at < v_due_before order by t.due_at limit 10000) as d
            union all
            select 'ephemeral_idempotency_keys' as name, count(*) as overdue, min(d.due) as since
              from (select t.expires_at as due from ephemeral_idempotency_keys as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d
            union all
            select 'ephemeral_slots' as name, count(*) as overdue, min(d.due) as since
              from (select t.due_at as due from ephemeral_slots as t where t.due_at < v_due_before order by t.due_at limit 10000) as d) as o
     where o.overdue > 0;
  elsif exists (select from policies as p where not p.durable) then
    return query values (
      'notice',
      'This server is a standby, which cannot read the buckets, leases and idempotency keys of ephemeral policies: overdue rows there are not found.',
      'Ask the primary, too: select * from ratelimit_doctor();');
  end if;

  return query
    select 'warning',
           format('ratelimit.%s holds %s dead row versions beside %s.', s.relname, s.n_dead_tup, counted(s.n_live_tup, 'row')),
           'Vacuum does not get to them, or an old snapshot keeps them: see the other findings. Then run: vacuum ratelimit.' || s.relname || ';' || v_where
      from pg_stat_all_tables as s
     where s.relid = any (v_tables)
       and s.n_dead_tup > 100000
       and s.n_dead_tup > s.n_live_tup
     order by s.relname;
  -- What a row takes up with its index entries is at most about twice its columns and 50 bytes.
  return query
    select 'warning',
           format('ratelimit.%s takes up %s for %s; less than %s would do.', b.relname, pg_size_pretty(b.size), counted(b.rows, 'row'), pg_size_pretty(b.needed)),
           'Space that is free in the table is used again. To give it back, in a quiet moment, because acquires wait: vacuum full ratelimit.' || b.relname || ';' || v_where
      from (select s.relname, pg_total_relation_size(s.relid) as size, r.rows, 10 * 1048576 + (r.rows * 2 * (w.width + 50))::bigint as needed
              from pg_stat_all_tables as s
              join pg_class as c on c.oid = s.relid
             cross join lateral (select greatest(s.n_live_tup, c.reltuples::bigint, 0) as rows) as r
             cross join lateral (select coalesce(sum(a.avg_width), 100) as width
                                   from pg_stats as a
                                  where a.schemaname = s.schemaname and a.tablename = s.relname) as w
             where s.relid = any (v_tables)) as b
     where b.size > 5 * b.needed
     order by b.relname;
  return query
    select 'warning',
           format('Of %s updates of ratelimit.%s only %s were heap-only: the others had to write to every index.',
                  s.n_tup_upd, s.relname, round(s.n_tup_hot_upd::numeric / s.n_tup_upd, 3)),
           'Pages have no room for new row versions. Most often an old snapshot or an idle transaction keeps the versions that are there. '
           'Or the table has another index or fillfactor than it was created with: see \d+ ratelimit.' || s.relname
      from pg_stat_all_tables as s
     where s.relid = any (v_tables[1:6])
       and s.n_tup_upd > 10000
       and s.n_tup_hot_upd < 0.7 * s.n_tup_upd
     order by s.relname;

  return query
    select 'warning',
           format('Session %s of role %s (%s) has a transaction open since %s: rows that it locks are waited for, and row versions that it may see stay.',
                  a.pid, a.usename, a.state, date_trunc('second', a.xact_start)),
           format('End the transaction; if it is stuck: select pg_terminate_backend(%s); The setting idle_in_transaction_session_timeout ends idle ones.', a.pid)
      from pg_stat_activity as a
     where a.datname = current_database()
       and a.pid <> pg_backend_pid()
       and a.backend_type <> 'autovacuum worker'
       and (a.backend_xmin is not null or a.backend_xid is not null)
       and a.xact_start < v_now - interval '1 minute'
     order by a.xact_start;
  return query
    select 'warning',
           format('Prepared transaction %L is open since %s: rows that it locks are waited for, and row versions that it may see stay.',
                  x.gid, date_trunc('second', x.prepared)),
           format('End it: commit prepared %1$L; or rollback prepared %1$L;', x.gid)
      from pg_prepared_xacts as x
     where x.database = current_database()
       and x.prepared < v_now - interval '1 minute'
     order by x.prepared;
  return query
    select 'notice',
           format('The owner of the package, %I, cannot see what sessions of other roles do: old snapshots and idle transactions are not found.', current_user),
           format('As a superuser, or with the admin option: grant pg_read_all_stats to %I;', current_user) || v_where
     where not pg_has_role(current_user, 'pg_read_all_stats', 'usage');

  return query
    select 'warning',
           format('The server uses %s transaction ids a second since the last checkpoint: at this rate autovacuum freezes all tables every %s hours.',
                  round(u.used / u.seconds), round(m.most / (u.used / u.seconds) / 3600, 1)),
           'Share calls: a Combiner and ratelimit_acquire_packed use two ids for a call, a plain grant one for itself. To freeze less often, '
           'and then restart: alter system set autovacuum_freeze_max_age = 1000000000;'
      from pg_control_checkpoint() as c
     cross join lateral (select pg_snapshot_xmax(pg_current_snapshot())::text::numeric
                                - split_part(c.next_xid, ':', 1)::numeric * 4294967296 - split_part(c.next_xid, ':', 2)::numeric as used,
                                extract(epoch from v_now - c.checkpoint_time) as seconds) as u
     cross join (select current_setting('autovacuum_freeze_max_age')::numeric as most) as m
     where not v_standby
       and u.seconds >= 30
       and u.used / u.seconds > m.most / 86400;  -- all within a day
  return query
    select 'warning',
           format('The server does not know the time zone %L of %s, so calls about them fail.', z.time_zone, z.users),
           'Install the time zone data that has it (tzdata-legacy on Debian), or name another zone with ratelimit_define_policy or ratelimit_override.' || v_where
      from (select u.time_zone, string_agg(u.name, ', ' order by u.name) as users
              from (select p.time_zone, format('policy %L', p.name) as name from policies as p where p.kind = 'quota'
                    union all
                    select o.time_zone, format('%s overrides of policy %L', count(*), p.name)
                      from policies as p
                      join overrides as o on o.policy_id = p.id
                     where p.overridden and p.kind = 'quota' and o.time_zone is not null
                     group by o.time_zone, p.name) as u
             group by u.time_zone) as z
     where (select count(*) from pg_timezone_names as n where n.name = z.time_zone) = 0  -- a scan for each zone, and none without quotas
     order by z.time_zone;
  return query
    select 'warning',
           format('The setting %s of the server is off, so nothing vacuums the tables.', s.name),
           format('alter system set %s = on; select pg_reload_conf();', s.name)
      from pg_settings as s
     where s.name in ('autovacuum', 'track_counts')
       and s.setting = 'off'
       and not v_standby  -- where nothing is vacuumed
     order by s.name;
  return query
    select 'warning',
           format('Autovacuum is off for ratelimit.%s.', c.relname),
           format('alter table ratelimit.%s reset (autovacuum_enabled);', c.relname) || v_where
      from pg_class as c
     cross join pg_options_to_table(c.reloptions) as o
     where c.oid = any (v_tables)
       and o.option_name = 'autovacuum_enabled'
       and not o.option_value::boolean
     order by c.relname;

  if v_requests is not null then
    return query execute replace($sql$
      select 'warning',
             format('ratelimit.pre_request limits role %L, and no role has that name: requests of the role that was meant pass without a limit, or count for ''*''.', s.role),
             format('Name the role as pg_roles does: update ratelimit.pre_request set role = ... where role = %L;', s.role) || $1
        from pre_request as s
       where s.role <> '*'
         and not exists (select from pg_roles as r where r.rolname = s.role)
       order by s.role
    $sql$, 'pre_request as s', 'ratelimit.' || quote_ident(v_requests) || ' as s') using v_where;
    return query execute replace($sql$
      select 'warning',
             format('ratelimit.pre_request names policy %L for role %L. %s: every request of the role fails.', s.policy, s.role,
                    case when p.id is null then 'No policy has that name' else 'It lends slots, and has no tokens' end),
             format('Define the policy, or name another one: update ratelimit.pre_request set policy = ... where role = %L;', s.role) || $1
        from pre_request as s
        left join policies as p on p.name = s.policy
       where p.id is null
          or p.kind = 'slots'
       order by s.role
    $sql$, 'pre_request as s', 'ratelimit.' || quote_ident(v_requests) || ' as s') using v_where;
  end if;
end;
$$;
comment on function ratelimit_doctor() is
'Looks for settings and rows that make limits slow or tables large, for wrong owners, and for names in ratelimit.pre_request that nothing has.
No row means that all is well. Sessions count after a minute, and statistics from their last reset. On a standby it
  cannot read the buckets of ephemeral policies, and returns a notice about them.
severity: warning or notice.
finding: the problem, with figures.
remedy: where possible a statement.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: monitoring.';
