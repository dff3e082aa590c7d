// Package client calls pgratelimit: token bucket rate limits that live in PostgreSQL.
//
// The server makes every decision, in one round trip. The client calls a function named
// ratelimit_* and decodes one row; it keeps no state unless told to ([DenialCache]), so any number of
// processes may share the same buckets, with each other and with callers in SQL.
//
// # Quickstart
//
// Package migrations, or make install, installs the functions. Then:
//
//	limiter := client.New(pool)
//
//	// Once, in a migration: buckets of 100 tokens that gain 10 a second.
//	err := limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 100, Refill: 10, Every: time.Second})
//
//	// For each request: one token of this user's bucket.
//	d, err := limiter.Acquire(ctx, "api", "user:42")
//	switch {
//	case err != nil:
//		// The database could not answer. Decide here whether requests pass.
//	case !d.Allowed:
//		// Try again in d.RetryAfter, unless d.Never().
//	}
//
// A denial is an answer and not an error. The zero [Decision], which comes with every error, is a denial.
//
// # Which limiter
//
// No limiter grants more tokens than there are, and all may be used side by side.
//
//   - [New] on a pool sends one call for each request. It is all that a program with few requests
//     at a time needs.
//   - [NewCombiner] lets requests that wait at the same moment share a call. With dozens of callers
//     at a time it is several times as fast, and a busy key, where calls otherwise queue for one
//     row, becomes the fastest case. One caller alone loses nothing; with a handful, answers take a
//     little longer than with New, and cost the server less. It is for pools only: a call for many
//     cannot be part of one caller's transaction, for which there is [Limiter.WithTx].
//   - [NewPrefetcher] answers for hot buckets from tokens that it has taken before: in less than a
//     microsecond. Tokens that one process holds are denied to other processes. For all other buckets
//     it is a Combiner.
//   - [NewSharded] spreads the keys over several databases, each with a Combiner, when one server is not enough.
//
// Code that only asks for tokens takes an [Acquirer], which is any of them, and in tests the fake of
// package clienttest.
//
// Whether an answer waits for the disk is another choice, and each step gives up something:
//
//   - Without options a grant is flushed before it is answered, and survives a crash of the server.
//   - [NoFlush] does not wait: a crash forgets the grants of the last moments, and those tokens can
//     be granted again.
//   - A policy with Durable [No] writes no log at all: after a crash its buckets are full.
//
// [DenialCache] answers repeated denials without the server, but notices late when other programs give
// tokens back.
//
// # Several limits
//
// One request may be charged to several buckets, all or nothing: the user's, and that of the organisation.
//
//	d, err := limiter.AcquireAll(ctx, []client.Charge{
//		{Policy: "user", Key: "42"},
//		{Policy: "org", Key: "7", Cost: client.Cost(5)},
//	})
//
// The RetryAfter of a denial is the time until all would be granted. d.Binding is the charge with the longest wait.
//
// An [Override] gives one bucket another size. A policy with [Policy.Shadow] watches, and denies nothing. A policy
// with a Refill of [Zero] is a budget.
//
// # At most so many at a time
//
// A policy with a [Policy.Lease] limits what is in flight: it lends up to Capacity slots of a key to holders. [Limiter.Hold]
// renews its lease for as long as the program lives, so a holder that dies leaks nothing. [Limiter.HoldWait] waits for slots.
//
// In a transaction, such as the one that claims a job, call the SQL functions ratelimit_hold, ratelimit_renew and
// ratelimit_release; [Limiter.HoldAs], [Limiter.Renew] and [Limiter.Release] are one call of each.
//
// # More than one server
//
// Where one server is not enough even with a Combiner, [NewSharded] spreads the keys over several databases. Each is told once
// which shard it is, by ratelimit_define_shard, and may move to another server; a key never moves to another database. Limits
// that are asked for together need the same key, under different policies, and so are in one database.
//
//	limiter, err := client.NewSharded(ctx, pools) // of shard 0, shard 1 …
//	d, err := limiter.Acquire(ctx, "api", key)
//	d, err = limiter.On(key).Refund(ctx, "api", key, 5)
//
// # Guards inside the database
//
// The function ratelimit_enforce, or a trigger on a table, can refuse a statement of yours. [AsDenial] finds the refusal in
// the statement's error, and how long to wait.
//
// # Retries and idempotency
//
// After a broken connection it is unknown whether the tokens were taken. An [IdempotencyKey] settles
// it: send the request again under the same key, and it is charged at most once. The program chooses
// the key, and never its own callers.
//
// The client itself repeats a call, up to 3 tries with a random pause of at most 50 ms and then 100 ms
// between them,
//
//   - when the server reports that nothing happened (serialization_failure, 40001, deadlock_detected,
//     40P01, or XX000 for a function that an upgrade replaced, or a shard of Citus that has moved), on a pool
//     and on a connection that is in no transaction; inside a transaction only the caller can begin again, and
//     gets the error
//   - when the connection was lost, on a pool, if the request has an idempotency key or a holder
//
// # Metrics
//
// [Observe] reports each answer, each wait, and the size of each combined call to the program. Package otellimit, a module of its
// own, makes OpenTelemetry's metrics of them:
//
//	metrics, err := otellimit.New(otel.GetMeterProvider())
//	limiter := client.NewCombiner(pool, client.Observe(metrics.Hooks()))
//
// # Bad networks
//
// Give every call a ctx that ends: the call ends with it, also when the server falls silent. A
// pgxpool.Pool replaces broken connections by itself. But an attempt to connect that hears nothing keeps
// its place in the pool for two minutes, unless connect_timeout is less: add connect_timeout=5 to the
// connection string. A connection that has fallen silent keeps its place for up to 15 seconds more, in
// which pgx asks the server to cancel the call; a pool with places to spare does not notice.
//
// If the database of a [Combiner] is slow or gone, the Combiner lets only so many callers wait. It refuses callers with a ctx that
// would end first: see [ErrOverloaded].
//
// # Transactions
//
// With [Limiter.WithTx] the acquire is part of a transaction: a rollback, also of a savepoint, gives the tokens back. Other acquires on
// a bucket that granted wait for its end. So acquire late in the transaction and end it soon. A caller that would rather be refused
// than wait sets lock_timeout, and gets [ErrLocked].
//
// Under REPEATABLE READ and SERIALIZABLE a grant fails with 40001 when the bucket has changed since
// the transaction's snapshot, and a denial is as old as the snapshot. READ COMMITTED, the default, has
// neither problem.
//
// # Poolers and encodings
//
// Each call is one statement that depends on no session state but search_path, so PgBouncer in transaction mode is fine. What the
// connection string of an older pooler needs, or of a database that is not UTF8, is in docs/operating.md. If search_path does not
// lead to the functions, name their schema with [Schema]. Text that the database cannot hold is [ErrInvalidArgument].
//
// # Clean-up
//
// Buckets that are full again and idempotency keys past their time should be removed now and then. If
// no pg_cron job does it, one program should. [Limiter.RunCleanup] lists the grants that its role needs.
//
//	go limiter.RunCleanup(ctx, time.Minute)
package client
