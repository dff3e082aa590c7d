do $outside$
begin
  if pg_catalog.now() operator(pg_catalog.<>) pg_catalog.statement_timestamp() then
    raise exception 'this file cannot run inside a transaction'
      using errcode = '25001',
            hint    = 'Leave out --single-transaction, or commit first.';
  end if;
end;
$outside$;
