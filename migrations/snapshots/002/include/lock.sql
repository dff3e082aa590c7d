{{- /* Locks one bucket, and reads its row into v_level and v_refilled_at; then the clock and the numbers, because it may have
       waited. A bucket without a row gets one, which is full. The argument unless is a condition under which it gets none; then
       v_has_row is false. The argument buckets is the name of the table. */ -}}
loop
      select b.level, b.refilled_at into v_level, v_refilled_at
        from {{ .buckets }} as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_has_row := found;
      v_now     := clock();
      if v_policy.overridden or not v_has_row then
        {{ template "include/numbers_again.sql" (dict "bare" true) }}
      end if;
      exit when v_has_row{{ with .unless }} or {{ . }}{{ end }};
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)
      on conflict on constraint {{ .buckets }}_pkey do nothing;
      v_has_row := found;
      exit when v_has_row;
    end loop;
{{- /**/ -}}
