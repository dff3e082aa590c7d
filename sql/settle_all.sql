-- Settles what ratelimit_acquire_all has granted under one idempotency key: all elements, or none.
--
-- The steps:
--   1. The grants of all buckets are read. If one is missing, or was settled with another cost, the call fails.
--   2. The buckets whose grants are to be settled are locked, in the order of ratelimit_acquire_all. Then step 1 is repeated, because
--      the locks may have waited.
--   3. Each bucket is settled as ratelimit_settle does, in that order. A failure rolls back all of it.
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
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_idempotency_key text collate "C" := idempotency_key;
  v_count           integer := cardinality(policies);
  v_policies        ratelimit.policies[];  -- parallel to the elements
  v_same            integer[];             -- likewise: the first element about the same bucket
  v_sums            numeric[];             -- likewise: the costs of all elements about the bucket
  v_order           integer[];             -- the first element of each bucket, in the order in which buckets are locked
  v_open            integer[];             -- those of them whose grants are not settled
  v_missing         integer[];             -- those without a live grant
  v_other           integer;               -- the first that was settled with another cost
  v_locked          boolean := false;
  v_policy          ratelimit.policies;
  v_numbers         ratelimit.numbers;
  v_key             text collate "C";
  v_now             timestamptz;
  v_grant           ratelimit.idempotency_keys;
  v_decision        ratelimit.decision;
  v_n               integer;               -- the element that an error is about; null: it is about all
  v_code            text;
  v_message         text;
  v_detail          text;
  v_hint            text;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  perform check_length('costs', cardinality(costs), v_count);
  select f.policies, f.keys, f.costs into policies, keys, costs from batch_form(policies, keys, costs, null, null) as f;
  perform check_name('idempotency_key', v_idempotency_key);
  v_policies := array(select p from unnest(policies) with ordinality as u (policy, n) left join policies as p on p.name = u.policy collate "C" order by u.n);
  select array_agg(u.same::integer order by u.n), array_agg(u.sum order by u.n),
         array_agg(u.n::integer order by (v_policies[u.n]).durable desc, u.policy, u.key) filter (where u.n = u.same)
    into v_same, v_sums, v_order
    from (select u.n, u.policy collate "C" as policy, u.key collate "C" as key, min(u.n) over same as same, sum(u.cost) over same as sum
            from unnest(policies, keys, costs) with ordinality as u (policy, key, cost, n)
          window same as (partition by u.policy collate "C", u.key collate "C")) as u;

  begin
    for v_i in 1..v_count loop
      v_n := v_i;
      perform check_charge(policies[v_n], keys[v_n], costs[v_n], null);
      perform refuse_slots(policies[v_n]) where (v_policies[v_n]).kind = 'slots';
      perform refuse('cost', v_sums[v_n]::text || ' in sum', 'Pass 0 to 9000000000000 tokens for a bucket.') where v_sums[v_n] > 9000000000000;
    end loop;
    for v_i in 1..v_count loop
      v_n := v_i;
      if (v_policies[v_n]).durable is not true and ((v_policies[v_n]).id is null or pg_is_in_recovery()) then
        perform refuse_policy(policies[v_n], v_policies[v_n]);  -- raises RL001 or 0A000
      end if;
    end loop;

    loop
      -- 1. The grants.
      v_now     := clock();
      v_open    := '{}';
      v_missing := '{}';
      v_other   := null;
      foreach v_n in array v_order loop
        v_policy := v_policies[v_n];
        v_key    := keys[v_n];
        if v_policy.durable then
          v_grant := k from idempotency_keys as k
                      where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        else
          v_grant := k from ephemeral_idempotency_keys as k
                      where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        end if;
        if (v_grant.expires_at > v_now) is not true then
          v_missing := v_missing || case when not v_policy.shadow then v_n end;
        elsif v_grant.settled is null then
          v_open := v_open || v_n;
        elsif v_grant.settled <> v_sums[v_n] then
          v_other := least(v_other, v_n);
        end if;
      end loop;
      v_missing := array_remove(v_missing, null);
      if v_missing <> '{}' then
        v_n := null;
        perform no_grants(array(select u.n from unnest(v_same) with ordinality as u (first, n) where u.first = any (v_missing) order by u.n), v_idempotency_key);  -- raises RL003
      end if;
      v_n := v_other;
      exit when v_n is not null or v_open = '{}' or v_locked;

      -- 2. The buckets.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      foreach v_n in array v_open loop
        v_policy  := v_policies[v_n];
        v_numbers := numbers_of_key(v_policy, keys[v_n], v_now);
        if v_policy.durable then
          perform lock_buckets(v_policy.id, keys[v_n:v_n], '{true}', array[v_numbers.policy], v_now);
        else
          perform lock_ephemeral_buckets(v_policy.id, keys[v_n:v_n], '{true}', array[v_numbers.policy], v_now);
        end if;
      end loop;
      v_locked := true;
    end loop;

    -- 3. The settlements. That of v_other fails with RL002.
    foreach v_n in array case when v_other is null then v_order else v_other || v_order end loop
      v_decision := settle(v_policies[v_n], keys[v_n], v_idempotency_key, v_sums[v_n]::bigint);
      decisions[v_n] := v_decision;
      replayed := replayed is true or v_decision.replayed;
    end loop;
  exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' or sqlstate 'RL003' then
    get stacked diagnostics v_code = returned_sqlstate, v_message = message_text, v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    raise exception using errcode = v_code, message = v_message, hint = v_hint,
                          detail  = case when v_n is null then v_detail else detail_of_element(v_message, v_detail, v_n, v_count) end;
  end;
  replayed  := replayed and v_open = '{}';
  decisions := array(select decisions[u.first] from unnest(v_same) with ordinality as u (first, n) order by u.n);
end;
$$;
comment on function ratelimit_settle_all(text[], text[], text, bigint[]) is
'Replaces the costs of the grants of one request by the real ones, of all its buckets or of none.
It is for the grants of ratelimit_acquire_all, or of several calls under one idempotency key. Element n of policies, keys and
  costs is one settlement, as of ratelimit_settle. A bucket that is named twice is settled once, with the sum.
An element that was settled with the same cost before is a replay, so a repeat completes a settlement of which a part was done.
policies: 1 to 1000 elements.
keys: as many elements as policies.
idempotency_key: the key of the grants.
costs: the real costs in whole tokens, 0 to 9000000000000 for a bucket, as many elements as policies.
replayed: this call has settled nothing, and an element is a replay.
decisions: one decision for each element, as ratelimit_settle returns it, after the whole.
Errors: as ratelimit_settle. RL003 names all elements without a live grant in DETAIL, and comes before RL002. An element that was
  acquired at cost 0 has no grant. DETAIL begins with the number of the element if there are several.
Locks: the bucket rows and then the rows of the idempotency keys, in the order of ratelimit_acquire_all, until the transaction ends. A
  replay locks nothing.
Writes: as ratelimit_settle, for each bucket.
Role: application.';
