-- The tokens that a batch about one policy asks of each bucket, in the order of key: size is the number of elements, and places are their
-- positions in the batch. wanted, in microtokens, is their sum, at most just above the largest capacity. A bucket
-- with an element that is not about 1 to 2147483647 tokens is left out. The sum of integers is a bigint, which costs less than the
-- numeric sum of bigints. The function is inlined.
create or replace function ratelimit.demands_of_batch(keys text[], costs bigint[])
  returns setof ratelimit.demand language sql immutable
as $$
  select e.key, least(sum(e.cost), 9000000000001) * 1000000, array_agg(e.place), count(*)
    from (select u.key collate "C" as key, u.place, case when u.cost between 1 and 2147483647 then u.cost::integer end as cost
            from unnest(keys, costs) with ordinality as u (key, cost, place)
           order by u.key collate "C", u.place) as e
   group by e.key
  having count(e.cost) = count(*)
   order by e.key
$$;
comment on function ratelimit.demands_of_batch(text[], bigint[]) is
  'What a batch about one policy asks of each bucket, in the order of key.';

-- The same for a batch about several policies, in the order in which buckets are locked: durable policies first, then by name, and
-- then by key. size is the number of elements that are not left out, and twice tells that a request names a bucket twice: that is
-- left to decide_in_order, which answers both elements with the sum. requests has the number of the request of each element; null:
-- its own number.
create or replace function ratelimit.parts_of(
    in policies text[], in keys text[], in costs bigint[], in requests bigint[],
    out parts ratelimit.part[], out size bigint, out twice boolean)
  language plpgsql stable
as $$
begin
  select coalesce(array_agg(row(p, s.demands, null)::part order by p.durable desc, p.name), '{}'), sum(s.size)::bigint, bool_or(s.twice)
    into parts, size, twice
    from (select a.policy, array_agg(row(a.key, a.wanted, a.places, a.size)::demand) as demands, sum(a.size) as size,
                 bool_or(requests is not null and a.size > 1
                         and a.size > (select count(distinct requests[u.place]) from unnest(a.places) as u (place))) as twice
            from (select e.policy, e.key, least(sum(e.cost), 9000000000001) * 1000000 as wanted, array_agg(e.place) as places, count(*) as size
                    from (select u.policy collate "C" as policy, u.key collate "C" as key, u.place,
                                 case when u.cost between 1 and 2147483647 then u.cost::integer end as cost  -- as in demands_of_batch
                            from unnest(parts_of.policies, keys, costs) with ordinality as u (policy, key, cost, place)
                           order by u.policy collate "C", u.key collate "C", u.place) as e
                   group by e.policy, e.key
                  having count(e.cost) = count(*)
                   order by e.policy, e.key) as a
           group by a.policy) as s
    join policies as p on p.name = s.policy;
end;
$$;
comment on function ratelimit.parts_of(text[], text[], bigint[], bigint[]) is
  'What a batch asks of the buckets of each of its policies, in the order in which they are locked.';

-- What is asked of each bucket of one policy by those elements of a batch that places names: elements and charges are parallel, and
-- smallest is the least of them; 0 if one is not about 1 to 2147483647 tokens. The function is inlined.
create or replace function ratelimit.demands_of_places(policy_name text, policies text[], keys text[], costs bigint[], places bigint[])
  returns table (key text, elements bigint[], charges bigint[], smallest bigint) language sql immutable
as $$
  select keys[u.place] collate "C", array_agg(u.place), array_agg(costs[u.place]),
         min(case when costs[u.place] between 1 and 2147483647 then costs[u.place] else 0 end)
    from unnest(places) as u (place)
   where policies[u.place] collate "C" = policy_name
   group by 1
$$;
comment on function ratelimit.demands_of_places(text, text[], text[], bigint[], bigint[]) is
  'What some elements of a batch ask of each bucket of one policy.';
