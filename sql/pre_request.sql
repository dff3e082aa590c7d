-- ratelimit_pre_request calls this with its settings; docs/postgrest/install.sql creates that function and the settings.
-- It takes one token for a request that PostgREST is about to serve. In a read-only transaction, which those of GET, HEAD
-- and calls of stable functions are, it can take nothing: there it refuses only if the bucket holds no token.
--
-- The key is the subject of the JWT, hashed, because it may be long or a secret. Without one it is the address in the header
-- X-Forwarded-For that is forwarded_hop from the right: each proxy adds the address of its caller, and addresses further left are
-- the word of the client. Of an IPv6 address the first 64 bits count, because whoever has one has all that begin so. Null turns
-- either off.
--
-- It runs with the search_path and the settings of ratelimit_pre_request, which acquire and peek count on.
-- Locks and writes: as ratelimit_acquire; nothing in a read-only transaction.
create or replace function ratelimit.limit_request(policy text, by_subject boolean, forwarded_hop integer, refuse_without_key boolean)
  returns void language plpgsql volatile
as $$
declare
  v_subject text;
  v_hops    text[];
  v_hop     text;
  v_address inet;
  v_key     text;
  v_policy  ratelimit.policies;
  v_denial  ratelimit.decision;
begin
  if by_subject then
    v_subject := nullif(nullif(current_setting('request.jwt.claims', true), '')::json ->> 'sub', '');
    v_key     := 'sub:' || encode(sha256(convert_to(v_subject, 'UTF8')), 'hex');
  end if;
  if v_key is null and forwarded_hop is not null then
    v_hops := string_to_array(nullif(current_setting('request.headers', true), '')::json ->> 'x-forwarded-for', ',');
    v_hop  := trim(v_hops[cardinality(v_hops) + 1 - forwarded_hop]);
    v_hop  := regexp_replace(v_hop, '^\[(.*)\](:\d+)?$|^([\d.]+):\d+$', '\1\3');  -- without a port
    v_hop  := regexp_replace(v_hop, '^::ffff:(?=[\d.]+$)', '', 'i');              -- IPv4 in IPv6
    begin
      v_address := v_hop::inet;
    exception when invalid_text_representation then
      v_address := null;  -- no address
    end;
    v_key := 'ip:' || case family(v_address) when 4 then host(v_address) else network(set_masklen(v_address, 64))::text end;
  end if;
  if v_key is null then
    if refuse_without_key then
      perform ratelimit.refuse_http('the request has no key to limit it by', null, 'Send a token that has a subject.', '{}');
    end if;
    return;
  end if;

  v_policy := ratelimit.policy_named(policy);
  if v_policy.kind = 'slots' then
    perform ratelimit.refuse_slots(v_policy.name);  -- raises 22023; peek would not
  end if;
  if current_setting('transaction_read_only') = 'off' then
    v_denial := ratelimit.acquire(v_policy, v_key, 1, null);
  else
    if v_policy.shadow or not v_policy.durable and pg_is_in_recovery() then  -- a standby cannot read ephemeral buckets
      return;
    end if;
    v_denial := ratelimit.peek(policy, v_key, 1);
  end if;
  if not v_denial.allowed then
    perform ratelimit.rate_limit_exceeded(policy, 1, v_denial, true);
  end if;
end;
$$;
comment on function ratelimit.limit_request(text, boolean, integer, boolean) is
  'Takes a token for a request of PostgREST, or refuses it.';
