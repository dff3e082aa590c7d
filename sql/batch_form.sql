-- Checks the arguments of a batch, and gives them the form that the rest wants: subscripts from 1, all costs, and for each element
-- its idempotency key and the number of its request. misfits are the requests of a size that is refused: their elements
-- lose their costs, so that they are refused, too.
create or replace function ratelimit.batch_form(
    inout policies text[], inout keys text[], inout costs bigint[], inout sizes integer[], inout idempotency_keys text[],
    out requests bigint[], out misfits bigint[])
  language plpgsql immutable
as $$
declare
  v_count constant integer := cardinality(policies);
begin
  perform check_length('policies', v_count, v_count);
  perform check_length('keys', cardinality(keys), v_count);
  perform check_length('costs', coalesce(cardinality(costs), v_count), v_count);
  if sizes is null then
    perform check_length('idempotency_keys', coalesce(cardinality(idempotency_keys), v_count), v_count);
  else
    perform check_sizes(sizes, v_count, cardinality(idempotency_keys));
  end if;
  if (is_list(policies) and is_list(keys) and is_list(costs) is not false and is_list(sizes) is not false
      and is_list(idempotency_keys) is not false) is not true then
    policies         := array(select unnest(policies));
    keys             := array(select unnest(keys));
    costs            := case when costs is not null then array(select unnest(batch_form.costs)) end;
    sizes            := case when sizes is not null then array(select unnest(batch_form.sizes)) end;
    idempotency_keys := case when idempotency_keys is not null then array(select unnest(batch_form.idempotency_keys)) end;
  end if;
  costs := coalesce(costs, array_fill(1::bigint, array[v_count]));
  if sizes is not null then
    select array_agg(u.request),
           case when batch_form.idempotency_keys is not null then array_agg(batch_form.idempotency_keys[u.request]) end
      into requests, idempotency_keys
      from (select u.request, generate_series(1, u.size) from unnest(batch_form.sizes) with ordinality as u (size, request)) as u;
    if 1 > any (sizes) or 1000 < any (sizes) then
      misfits := array(select u.request
                         from unnest(batch_form.sizes) with ordinality as u (size, request)
                        where u.size not between 1 and 1000);
      costs   := array(select case when requests[u.element] <> all (misfits) then u.cost end
                         from unnest(costs) with ordinality as u (cost, element));
    end if;
  end if;
end;
$$;
comment on function ratelimit.batch_form(text[], text[], bigint[], integer[], text[]) is
  'Checks the arguments of a batch, and gives them one form.';

-- Tells the errors of requests that are too large or empty, however the others were decided.
create or replace function ratelimit.with_misfits(answers ratelimit.packed, sizes integer[], misfits bigint[])
  returns ratelimit.packed language plpgsql immutable
as $$
declare
  v_misfit bigint;
  v_i      integer;
begin
  foreach v_misfit in array misfits loop
    v_i := coalesce(array_position(answers.refused, v_misfit), coalesce(cardinality(answers.refused), 0) + 1);
    answers.refused[v_i]        := v_misfit;
    answers.error_codes[v_i]    := '22023';
    answers.error_messages[v_i] := 'invalid sizes';
    answers.error_details[v_i]  := format('Request %s has %s elements.', v_misfit, sizes[v_misfit]);
    answers.error_hints[v_i]    := 'Pass 1 to 1000 elements for each request.';
  end loop;
  return answers;
end;
$$;
comment on function ratelimit.with_misfits(ratelimit.packed, integer[], bigint[]) is
  'The answers of a batch with the errors of requests that are too large or empty.';
