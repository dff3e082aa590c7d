{{- /* The end of an INSERT of idempotency keys: an expired key is overwritten, and a live key is left alone, which leaves
       its row out of FOUND and of RETURNING. The argument idempotency_keys is the name of the table, whose alias
       is k. It needs the local v_now. */ -}}
on conflict on constraint {{ .idempotency_keys }}_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now
{{- /**/ -}}
