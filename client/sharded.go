package client

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// checkTimeout is how long NewSharded waits for a shard.
const checkTimeout = 5 * time.Second

// A Sharded spreads keys over several databases, its shards: [ShardOf] returns the shard of a key. Each shard has a Combiner, or
// with a [Prefetch] a [Prefetcher], and a pool of its own. So a shard that fails, or falls silent, holds up only the callers of its keys.
// No other shard steps in: a bucket that is elsewhere would be full.
//
// [Sharded.On] has all calls about a key, and [Sharded.Each] those about all shards.
//
// Close it when it is no longer used.
type Sharded struct{ shards []*Prefetcher }

// NewSharded returns a Sharded on the databases of pools: shard 0, shard 1 and so on, a power of two of them. Each database must have got
// its shard number, by ratelimit_define_shard. The role needs EXECUTE on ratelimit_shard, and the rights that [NewCombiner] names, or with
// a [Prefetch] [NewPrefetcher]. Options are the options of NewPrefetcher, for each of the shards. Panics where NewPrefetcher does.
//
// It asks every database which shard it is, and fails if a database is another shard, or no shard, or returns an error. A database
// that cannot be reached within 5 seconds is asked before its first call. So a program can start beside a shard that is down. It
// fails if no database can be reached.
//
// Errors: [ErrWrongShard]; of each shard a [*ShardError].
func NewSharded[P Pool](ctx context.Context, pools []P, opts ...Option) (*Sharded, error) {
	of := len(pools)
	if of < 1 || of > maxShards || of&(of-1) != 0 {
		return nil, failed("open shards", fmt.Errorf("%w: %d databases are listed, and the number of shards is a power of two", ErrWrongShard, of))
	}
	s := &Sharded{make([]*Prefetcher, of)}
	for i, pool := range pools {
		s.shards[i] = NewPrefetcher(pool, slices.Concat(opts, []Option{at(i, of)})...)
	}
	if err := s.check(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// check makes sure that the databases that answer are the shards that they are listed as.
func (s *Sharded) check(ctx context.Context) error {
	checking, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	errs := s.each(func(_ int, on *Prefetcher) error { return on.checkPlace(checking) })
	refusals := slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil || isSilence(err) })
	switch {
	case len(refusals) > 0:
		return errors.Join(refusals...)
	case ctx.Err() != nil:
		return failed("open shards", ctx.Err())
	case !slices.Contains(errs, nil):
		return errors.Join(errs...)
	}
	return nil
}

// On returns the limiter of the shard that has a key. Its calls are about keys of this shard only: buckets of other keys would be
// full there. A transaction for its WithTx is one of the shard's pool.
func (s *Sharded) On(key string) *Prefetcher { return s.shards[ShardOf(key, len(s.shards))] }

// Each calls a function with the number and the limiter of each shard, all at the same time. It returns when all have returned,
// and joins their errors, each in a [*ShardError].
func (s *Sharded) Each(call func(shard int, on *Prefetcher) error) error {
	return errors.Join(s.each(call)...)
}

// each returns the errors of all shards, nil for a shard without error.
func (s *Sharded) each(call func(shard int, on *Prefetcher) error) []error {
	errs := make([]error, len(s.shards))
	var calls sync.WaitGroup
	for n, on := range s.shards {
		calls.Go(func() { errs[n] = s.failed(n, call(n, on)) })
	}
	calls.Wait()
	return errs
}

func (s *Sharded) failed(shard int, err error) error {
	if err == nil {
		return nil
	}
	return &ShardError{shard, len(s.shards), err}
}

// Close closes the limiters of all shards at the same time: see [Prefetcher.Close].
func (s *Sharded) Close() {
	s.each(func(_ int, on *Prefetcher) error { on.Close(); return nil })
}

// Acquire is [Prefetcher.Acquire] on the shard of key.
//
// Errors: as Prefetcher.Acquire, in a [*ShardError].
func (s *Sharded) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	n := ShardOf(key, len(s.shards))
	d, err := s.shards[n].Acquire(ctx, policy, key, opts...)
	return d, s.failed(n, err)
}

// AcquireAll is [Combiner.AcquireAll] if all charges belong to one shard, and as exact. That is so when they have one key, under
// several policies. Charges of several shards are refused: no transaction spans two databases, so after a crash between them
// only a part of the tokens would be taken.
//
// Errors: [ErrSeveralShards]; as Combiner.AcquireAll, in a [*ShardError].
func (s *Sharded) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	n := 0 // without charges, any shard returns the error
	for i, c := range charges {
		switch of := ShardOf(c.Key, len(s.shards)); {
		case i == 0:
			n = of
		case of != n:
			return JointDecision{}, failed(verbAcquireAll, fmt.Errorf("%w: charge 0 to shard %d and charge %d to shard %d of %d, and a request is one "+
				"transaction in one database. Give limits that are asked for together the same key, under different policies; "+
				"or ask for each alone, and refund when a later one is denied", ErrSeveralShards, n, i, of, len(s.shards)))
		}
	}
	d, err := s.shards[n].AcquireAll(ctx, charges, opts...)
	return d, s.failed(n, err)
}

// DefinePolicy is [Limiter.DefinePolicy] on all shards, at the same time. It is not one transaction: after an error the policy may
// be defined on some shards only. Repeat it until it succeeds.
func (s *Sharded) DefinePolicy(ctx context.Context, p Policy) error {
	return s.Each(func(_ int, on *Prefetcher) error { return on.DefinePolicy(ctx, p) })
}

// DropPolicy is [Limiter.DropPolicy] on all shards, at the same time. It is not one transaction: after an error some shards may
// have the policy still. Repeat it until it succeeds, or returns [ErrUnknownPolicy], which it returns only if no shard had the policy.
func (s *Sharded) DropPolicy(ctx context.Context, name string) error {
	errs := s.each(func(_ int, on *Prefetcher) error { return on.DropPolicy(ctx, name) })
	known := slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return errors.Is(err, ErrUnknownPolicy) })
	if len(known) == 0 {
		return errors.Join(errs...)
	}
	return errors.Join(known...)
}

// maxShards is the most that ratelimit_define_shard accepts.
const maxShards = 1 << 16

// verbCheck names the question which shard a database is.
const verbCheck = "check the shard"

// ShardOf returns the number, from 0, of the shard that has a key, if there are so many shards, a power of two. It is the low bits
// of the first 8 bytes, big endian, of the SHA-256 of the key. It is the same in every language, and never changes:
// testdata/shards.json has examples. The policy does not count, so all limits of a user are in one shard.
func ShardOf(key string, shards int) int {
	if shards == 1 {
		return 0
	}
	hash := sha256.Sum256([]byte(key))
	return int(binary.BigEndian.Uint64(hash[:8]) & uint64(shards-1))
}

// A ShardError is an error of one shard of a [Sharded]. Its other shards may be well.
type ShardError struct {
	Shard, Of int   // the shard's number, from 0, and the number of shards
	Err       error // the error of its [Combiner]
}

func (e *ShardError) Error() string {
	return fmt.Sprintf("pgratelimit: shard %d of %d: %s", e.Shard, e.Of, strings.TrimPrefix(e.Err.Error(), "pgratelimit: "))
}

func (e *ShardError) Unwrap() error { return e.Err }

// CheckShard returns a function that finds out whether a connection leads to the shard of this number. As AfterConnect of
// a pgxpool.Config it refuses all other connections: after a database was moved, a name or a pooler may
// still, or already, lead elsewhere. [NewSharded] asks once; this function asks for each connection. The option is [Schema].
//
// Errors: [ErrWrongShard], in a [*ShardError].
func CheckShard(shard, of int, opts ...Option) func(context.Context, *pgx.Conn) error {
	config := newConfig("CheckShard", aLimiter, opts)
	return func(ctx context.Context, conn *pgx.Conn) error {
		l := newLimiter(conn, config)
		if err := l.checkShard(ctx, shard, of); err != nil {
			return &ShardError{shard, of, err}
		}
		return nil
	}
}

// CheckAlone is CheckShard for a program of one database: it refuses connections to a database that is one of several shards, where
// a program that was given the URL of a shard by mistake would find full buckets.
//
// Errors: [ErrWrongShard].
func CheckAlone(opts ...Option) func(context.Context, *pgx.Conn) error {
	config := newConfig("CheckAlone", aLimiter, opts)
	return func(ctx context.Context, conn *pgx.Conn) error {
		l := newLimiter(conn, config)
		return l.checkShard(ctx, 0, alone)
	}
}

// alone is the number of shards of a database that is not one of several.
const alone = 0

// A place is the shard that a limiter's database must be. It is checked before the first call.
type place struct {
	shard, of int
	isChecked atomic.Bool
}

// at is the option of a limiter that must be in a place. Limiters with the same options are each checked.
func at(shard, of int) Option {
	return option{set: func(c *config) { c.place = &place{shard: shard, of: of} }}
}

// checkPlace returns an error if the database is in another place than the limiter's.
func (l *limiter) checkPlace(ctx context.Context) error {
	if l.place == nil || l.place.isChecked.Load() {
		return nil
	}
	err := l.checkShard(ctx, l.place.shard, l.place.of)
	if err == nil {
		l.place.isChecked.Store(true)
	}
	return err
}

// checkShard returns an error unless the database is the shard of this number, or alone.
func (l *limiter) checkShard(ctx context.Context, shard, of int) error {
	where, isShard, isOf, err := l.whichShard(ctx)
	if err != nil {
		return err
	}
	switch {
	case of == alone && isOf > 1:
		err = fmt.Errorf("%w: %s is shard %d of %d: buckets of most keys are elsewhere, and would be full here. List all %d databases, in "+
			"SHARD_URLS for pgratelimit and for NewSharded in Go", ErrWrongShard, where, isShard, isOf, isOf)
	case of == alone:
	case isOf == 0:
		err = fmt.Errorf("%w: %s is no shard. If it is new and meant to be this one, run there: select ratelimit_define_shard(%d, %d);",
			ErrWrongShard, where, shard, of)
	case isOf != of:
		err = fmt.Errorf("%w: %s is shard %d of %d. List all %d databases, in the order of their numbers",
			ErrWrongShard, where, isShard, isOf, isOf)
	case isShard != shard:
		err = fmt.Errorf("%w: %s is shard %d of %d. List the databases in the order of their numbers, each once",
			ErrWrongShard, where, isShard, isOf)
	}
	return failed(verbCheck, err)
}

// whichShard returns a name of the database, its shard number, and the number of shards: 0 if it is no shard.
func (l *limiter) whichShard(ctx context.Context) (where string, shard, of int, err error) {
	var database string
	var host pgtype.Text
	var port, isShard, isOf pgtype.Int8
	asks := *l
	asks.place = nil
	err = asks.query(ctx, call{
		verb: verbCheck,
		columns: "pg_catalog.current_database()::text, pg_catalog.host(pg_catalog.inet_server_addr()), pg_catalog.inet_server_port()::bigint, " +
			"pg_catalog.max(shard)::bigint, pg_catalog.max(of)::bigint", // one row, also without a shard
		function:   "ratelimit_shard()",
		repeatable: true,
	}, &database, &host, &port, &isShard, &isOf)
	where = fmt.Sprintf("database %q", database)
	if host.Valid { // it is no Unix socket
		where += fmt.Sprintf(" of the server at %s:%d", host.String, port.Int64)
	}
	return where, int(isShard.Int64), int(isOf.Int64), err
}

// isSilence reports whether a database that failed to answer may be well later, under any name: it cannot be
// reached, is starting or stopping, or has no place for another connection.
func isSilence(err error) bool {
	pgErr, isAnswer := errors.AsType[*pgconn.PgError](err)
	return !errors.Is(err, ErrWrongShard) && (!isAnswer || ofSilence.MatchString(pgErr.Code))
}

// ofSilence matches the codes of connections, resources, operators and the system.
var ofSilence = regexp.MustCompile(`^(08|53|57|58)`)
