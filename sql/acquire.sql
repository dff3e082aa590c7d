-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- A repeat under the same idempotency key is the same request answered again, and takes nothing. So the program
-- chooses the idempotency key, one for each operation. If its own clients chose it, a client that repeats one
-- would pass every time.
--
-- The steps, in include/decide.sql. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key
-- that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty. If its grant was settled, that is RL004.
--   2. One conditional update takes the tokens. Concurrent acquires take turns at it, and each takes tokens
--      only if the bucket still has enough.
--   3. If the update takes nothing, the bucket is read.
--      If it has too few tokens, the idempotency key is looked up again, because the request that emptied the
--      bucket may have had the same one; then the answer is the replay or the denial.
--      If the bucket has no row, it is full: the row is created, less the cost. If another session created the
--      row first, step 2 is repeated.
--      If the bucket has enough tokens after all, step 2 is repeated.
--   4. After the tokens are taken, the idempotency key is remembered. By now this call has locked the bucket's
--      row in step 2, or created it in step 3. So a live idempotency key that turns up only now was committed
--      after step 1 and before that. The tokens go back and the idempotency key is replayed. The refill that
--      step 2 credited stays.
-- A cost of 0 or above capacity takes nothing: it has only steps 1 and 3, and is answered from the bucket as read.
--
-- The clock is read before step 1 and in each step 3. The update of step 2 and the insert of step 3 may wait for
-- another session. A grant that waited is answered by the clock from before the wait: its reset_after is never
-- too short, and the refill of the wait is credited later. A denial is answered by the clock from after the wait.
--
-- Under REPEATABLE READ and SERIALIZABLE, an acquire that would take from a bucket that changed since the snapshot
-- fails with 40001, and a denial is as old as the snapshot. In a read-only transaction, an acquire that gets to
-- the update of step 2 fails with 25006, even if it would be denied.
--
-- Locks:  a grant and a replay of step 4 hold the bucket row and the row of the idempotency key until the
--         caller's transaction ends. A denial and a replay of step 3 hold the bucket row only if they had to
--         wait for it. A replay of step 1 holds nothing.
-- Writes: a grant writes the bucket and its idempotency key. A denial writes nothing. A replay writes
--         nothing, unless it is the replay of step 4.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
{{- /* enforce.sql has the same body. The argument is the name of the function. */ -}}
{{ define "acquire" -}}
declare
  {{ template "locals_of_decide" (dict "function" .) }}
begin
  if not acceptable(v_key, v_cost) or v_idempotency_key is not null then  -- inlined; the call of check_request raises the error
    if (acceptable(v_key, v_cost) and is_name(v_idempotency_key)) is not true then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  {{ template "include/policy.sql" . }}
  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  if v_policy.durable then
    {{ template "include/decide.sql" (dict "kind" "acquire" "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "include/decide.sql" (dict "kind" "acquire" "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
end;
{{- end }}
{{ template "acquire" "ratelimit_acquire" }}
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key is the same request answered again, and takes nothing.';
