-- Makes the functions of which the text is that of another one: what the functions about durable policies do, on the unlogged tables of
-- ephemeral ones; and ratelimit_acquire and ratelimit_peek for the guards, ratelimit_settle for ratelimit_settle_all, and ratelimit_reset
-- for ratelimit_reset_all, which do not depend on the schema of the public functions.
--
-- The twin of a function about a durable table has ephemeral before the table in its name. That of a public function that ends with a
-- block for durable policies is that block, with _ephemeral at the end of its name. They are made of functions of the owner of schema
-- ratelimit, and of no others. This fails rather than leave a durable table in the text of a twin, and drops twins that an older version
-- had. It is the last file, because it reads the functions as they are installed.
do $twins$
declare
  v_path    text := pg_catalog.current_setting('search_path');
  v_home    text := pg_catalog.current_schema();
  v_about   constant text[] := '{take_quota_of_buckets, take_quotas_from_buckets, refund_quota_of_buckets, look_at_slots, take_from_buckets,
    take_any_from_buckets, covered_in_buckets, lock_demanded_buckets, denied_in_buckets, denied_in_any_buckets, remember_idempotency_keys,
    rows_of_buckets, live_idempotency_keys, lock_buckets, create_buckets, write_buckets, level_of_buckets, look_past_end_in_buckets}';
  v_ends    constant text[] := '{acquire, charge, settle, reserve, acquire_up_to, refund, peek, pause, hold, renew, release}';
  v_tables  constant text   := '(buckets|idempotency_keys|slots|leases)';
  v_comment constant text   := 'The steps of ratelimit_%s for an ephemeral policy.';
  v_made    text[] := '{}';
  v_twin    record;
  v_name    text;
  v_old     pg_catalog.regprocedure;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_twin in
    with origin as (
      select p.oid, p.proname as name, p.pronamespace = n.oid as is_private, pg_get_function_result(p.oid) as result,
             pg_get_function_identity_arguments(p.oid) as arguments, p.prosrc as body, case p.provolatile when 's' then 'stable' else 'volatile' end as volatility,
             regexp_replace(pg_get_function_identity_arguments(p.oid), '^policy text', 'v_policy ratelimit.policies') as of_policy,
             substring(p.prosrc from '\n(  declare\n.*)\nend;\n$') as steps
        from pg_namespace as n
        join pg_proc as p on p.proowner = n.nspowner and p.pronamespace in (n.oid, quote_ident(v_home)::regnamespace)
       where n.nspname = 'ratelimit'
    ), twin as (
      select a.name as origin, regexp_replace(a.name, '_' || v_tables || '$', '_ephemeral_\1') as name, o.arguments, o.result, null as volatility,
             pg_get_functiondef(o.oid) as text, obj_description(o.oid, 'pg_proc') as comment
        from unnest(v_about) as a (name)
        left join origin as o on o.name = a.name and o.is_private
      union all
      select 'ratelimit_' || e.name, e.name || '_ephemeral', o.of_policy, o.result, o.volatility, E'\n' || o.steps || E'\n', format(v_comment, e.name)
        from unnest(v_ends) as e (name)
        left join origin as o on o.name = 'ratelimit_' || e.name and not o.is_private
      union all
      select 'ratelimit_' || c.name, c.name, o.of_policy, o.result, o.volatility,
             format(E'\nbegin\n  if not v_policy.durable then\n    if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;\n    return %s_ephemeral(%s);\n  end if;\n%s\nend;\n',
                    c.name, regexp_replace(o.of_policy, '(\w+) [^,]+', '\1', 'g'), o.steps),
             format('The steps of ratelimit_%s, for other functions.', c.name)
        from unnest('{acquire, settle}'::text[]) as c (name)
        left join origin as o on o.name = 'ratelimit_' || c.name and not o.is_private
      union all
      select 'ratelimit_' || g.name, g.name, o.arguments, o.result, o.volatility, o.body, format('What ratelimit_%s does, for other functions.', g.name)
        from unnest('{peek, reset}'::text[]) as g (name)
        left join origin as o on o.name = 'ratelimit_' || g.name and not o.is_private
    )
    select t.* from twin as t
  loop
    if v_twin.text is null then
      raise exception 'a function that has a twin was not found, or has no block for durable policies'
        using errcode = '42883', detail = format('It is %s.', v_twin.origin),
              hint = 'sql/twins.sql lists the functions. Drop one of the same name that is not of the package.';
    elsif v_twin.volatility is not null then
      v_twin.text := format(E'create or replace function ratelimit.%I(%s)\n returns %s\n language plpgsql\n %s\nas $steps$%s$steps$',
                            v_twin.name, v_twin.arguments, v_twin.result, v_twin.volatility, v_twin.text);
    end if;

    if v_twin.name not in ('acquire', 'settle', 'peek', 'reset') then
      v_twin.text := regexp_replace(v_twin.text, '\m((from|join|update|into) (ratelimit\.)?|constraint )(?=' || v_tables || '( as | \(|_pkey ))', '\1ephemeral_', 'g');
      foreach v_name in array v_about loop
        v_twin.text    := regexp_replace(v_twin.text, '\m' || v_name || '\M', regexp_replace(v_name, v_tables || '$', 'ephemeral_\1'), 'g');
        v_twin.comment := regexp_replace(v_twin.comment, '\m' || v_name || '\M', regexp_replace(v_name, v_tables || '$', 'ephemeral_\1'), 'g');
      end loop;
      if v_twin.text !~ ('^[^(]* ratelimit\.' || v_twin.name || '\(') or v_twin.name = v_twin.origin
         or regexp_replace(v_twin.text, '--[^\n]*', '', 'g')
            ~ ('\m((from|update|into|join|only|using|table)\s+(ratelimit\.)?' || v_tables || '\M|' || v_tables || '_pkey\M'
               '|(?!refuse_|\w*ephemeral_)\w+_' || v_tables || '\()') then
        raise exception 'a twin would be about a durable table'
          using errcode = '42P16', detail = format('It is %s, of %s.', v_twin.name, v_twin.origin),
                hint = 'sql/twins.sql lists the functions, and knows the statements that it changes.';
      end if;
    end if;

    for v_old in
      select p.oid
        from pg_proc as p
       where p.pronamespace = 'ratelimit'::regnamespace
         and p.proname = v_twin.name
         and (pg_get_function_identity_arguments(p.oid), pg_get_function_result(p.oid)) is distinct from (v_twin.arguments, v_twin.result)
    loop
      execute format('drop function %s', v_old);
    end loop;
    execute v_twin.text;
    execute format('comment on function ratelimit.%I(%s) is %L', v_twin.name, v_twin.arguments, v_twin.comment);
    v_made := v_made || v_twin.name;
  end loop;

  for v_old in
    select p.oid
      from pg_proc as p
     where p.pronamespace = 'ratelimit'::regnamespace
       and (p.proname ~ ('_ephemeral_' || v_tables || '$')
         or obj_description(p.oid, 'pg_proc') = format(v_comment, regexp_replace(p.proname, '_ephemeral$', '')))
       and p.proname <> all (v_made)
  loop
    execute format('drop function %s', v_old);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$twins$;
