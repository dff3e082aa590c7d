if current_setting('transaction_read_only') = 'on' then
  raise exception 'cannot write in a read-only transaction'
    using errcode = '25006',
          detail  = case when pg_is_in_recovery() then 'This server is a standby.'
                         else format('default_transaction_read_only is %s.', current_setting('default_transaction_read_only')) end,
          hint    = 'Call it on the primary, in a read-write transaction. ratelimit_peek writes nothing, and works here.';
end if;
{{- /* For functions that are about to write: without it the error of the statement shows its SQL. */ -}}
