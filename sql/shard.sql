-- The client finds the shard of a key, and this function lets it make sure that it has found the database. No function
-- that decides looks here. The row is part of a dump and of a copy of the database: wherever the database goes, it is
-- the shard that it was.
create or replace function ratelimit_shard()
  returns table (shard integer, of integer)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select s.shard, s.of from shard as s
$$;
comment on function ratelimit_shard() is
'Returns which of how many shards this database is, and no row if it is none.
shard: the number of the shard, from 0.
of: the number of shards, a power of two.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: application, with client.NewSharded.';

-- A different number is refused: the keys that the database has would belong elsewhere.
create or replace function ratelimit_define_shard(shard integer, of integer)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_is shard;
begin
  if (ratelimit_define_shard.of between 1 and 65536 and ratelimit_define_shard.of & (ratelimit_define_shard.of - 1) = 0) is not true then
    perform refuse('of', ratelimit_define_shard.of::text, 'Pass the number of all shards: a power of two, at most 65536.');
  end if;
  if (ratelimit_define_shard.shard between 0 and ratelimit_define_shard.of - 1) is not true then
    perform refuse('shard', ratelimit_define_shard.shard::text, 'Pass the number of this shard: 0 or more, and less than the number of all shards.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  lock table shard in share row exclusive mode;
  insert into shard as s (shard, of)
  select ratelimit_define_shard.shard, ratelimit_define_shard.of
   where not exists (select from shard as t);
  select s.* into v_is from shard as s;
  if (v_is.shard, v_is.of) <> (ratelimit_define_shard.shard, ratelimit_define_shard.of) then
    raise exception 'invalid shard'
      using errcode = '22023',
            detail  = format('Database %s is shard %s of %s already.', current_database(), v_is.shard, v_is.of),
            hint    = 'A database is one shard for life. If it was numbered by mistake and is not in use, uninstall the package and install it again.';
  end if;
end;
$$;
comment on function ratelimit_define_shard(integer, integer) is
'Makes this database one of several shards, for as long as the package is installed.
A repeat with the same numbers changes nothing.
shard: the number of this shard, 0 to of - 1.
of: the number of shards, a power of two up to 65536.
Errors: 22023 for a bad argument and for a database that is another shard already, 25006 in a read-only transaction.
Locks: table ratelimit.shard against other calls of this function, until the transaction ends. Readers do not wait.
Writes: ratelimit.shard.
Role: administrator.';
