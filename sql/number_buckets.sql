-- Prepares a batch for decide_in_order: numbers its policies and buckets, in the order in which buckets are locked within their
-- kind, and relates each element to earlier elements on its bucket. It reads no table. The arguments are parallel to the elements.
create or replace function ratelimit.number_buckets(
    in  policies text[], in keys text[], in costs bigint[], in idempotency_keys text[], in requests bigint[],
    out names          text[],     -- of the policies, in order
    out first          integer[],  -- for each policy, the number of its first bucket; one more: the number after the last
    out bucket_keys    text[],     -- for each bucket, its key
    out bucket_numbers integer[],  -- for each element, the number of its bucket
    out charges        bigint[],   -- what its request charges to that bucket
    out same           integer[],  -- the first element of its request on the same bucket
    out twins          integer[],  -- the last element of an earlier request on the same bucket, under the same idempotency key
    out bad            boolean[])  -- whether an argument is out of range
  language plpgsql immutable
as $$
begin
  select array_agg(s.bucket::integer order by s.place), array_agg(s.charge order by s.place), array_agg(s.same::integer order by s.place),
         array_agg(s.twin::integer order by s.place), array_agg(s.bad order by s.place)
    into bucket_numbers, charges, same, twins, bad
    from (select e.place, dense_rank() over (order by e.policy, e.key) as bucket,
                 least(sum(greatest(e.cost, 0)) over same, 9223372036854775807)::bigint as charge,
                 min(e.place) over same as same,
                 case when e.idempotency_key is not null then
                   max(e.place) over (partition by e.policy, e.key, e.idempotency_key order by e.request
                                      range between unbounded preceding and 1 preceding)
                 end as twin,
                 (acceptable(e.key, e.cost) and is_name(e.policy) and is_name(e.idempotency_key) is not false) is not true as bad
            from (select u.policy collate "C" as policy, u.key collate "C" as key, u.cost,
                         u.idempotency_key collate "C" as idempotency_key, u.request, u.place
                    from unnest(policies, keys, costs, idempotency_keys, requests)
                         with ordinality as u (policy, key, cost, idempotency_key, request, place)) as e
          window same as (partition by e.policy, e.key, e.request)) as s;
  select array_agg(b.key order by b.policy, b.key)
    into bucket_keys
    from (select distinct u.policy collate "C" as policy, u.key collate "C" as key from unnest(policies, keys) as u (policy, key)) as b;
  select array_agg(p.name order by p.first), array_agg(p.first order by p.first) || cardinality(bucket_keys) + 1
    into names, first
    from (select u.policy collate "C" as name, min(u.bucket) as first
            from unnest(policies, bucket_numbers) as u (policy, bucket)
           group by 1) as p;
end;
$$;
comment on function ratelimit.number_buckets(text[], text[], bigint[], text[], bigint[]) is
  'The policies and buckets of a batch, numbered in order, and how its elements are related.';

-- The order in which the buckets of policies are locked: durable policies first, then by name, as number_buckets has them. Policies
-- that are not known have no place in it.
create or replace function ratelimit.in_locking_order(policies ratelimit.policies[])
  returns integer[] language plpgsql immutable
as $$
begin
  return array(select p.n
                 from generate_subscripts(policies, 1) as p (n)
                where (policies[p.n]).id is not null
                order by (policies[p.n]).durable desc, p.n);
end;
$$;
comment on function ratelimit.in_locking_order(ratelimit.policies[]) is
  'The numbers of the policies that are known, in the order in which their buckets are locked.';
