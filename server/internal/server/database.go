package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// connections is the size of a pool, unless its URL has pool_max_conns.
const connections = 10

// connectTimeout holds for a URL without connect_timeout. An attempt keeps its place in the pool until then.
const connectTimeout = 5 * time.Second

// startTimeout is the longest wait for a shard at the start. The server starts without a shard that does not answer.
const startTimeout = 5 * time.Second

// databases are the one database of the limiter, or its shards.
type databases struct {
	pools  []*pgxpool.Pool
	shards bool
	nodes  sync.Map // of Citus: their pools, which the limiters close
	log    *slog.Logger
	down   []atomic.Bool // which were when they were checked last
}

// openDatabases returns pools that can acquire. It defines the default policy if the configuration has one.
func openDatabases(ctx context.Context, c config.Config, log *slog.Logger) (*databases, error) {
	d := &databases{shards: c.AreShards, log: log, down: make([]atomic.Bool, len(c.URLs))}
	for n := range c.URLs {
		pool, err := openPool(ctx, c, n)
		if err != nil {
			d.close()
			return nil, d.of(n, err)
		}
		d.pools = append(d.pools, pool)
	}
	err := d.onEach(ctx, func(pool *pgxpool.Pool) error {
		if c.DefaultPolicy.Name != "" {
			if err := definePolicy(ctx, pool, c.DefaultPolicy); err != nil {
				return err
			}
		}
		if len(c.Prefetches) > 0 {
			return checkPrefetches(ctx, pool, c.Prefetches, log)
		}
		return nil
	})
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *databases) close() {
	for _, pool := range d.pools {
		pool.Close()
	}
}

// limiters returns the limiter of each shard, or of each of Citus, which of them has a key, and what closes them. It checks numbers of shards.
func (d *databases) limiters(ctx context.Context, c config.Config, options []client.Option) (limiters []service.Limiter, shardOf func(string) int, end func(), err error) {
	if d.shards {
		sharded, err := client.NewSharded(ctx, d.pools, options...)
		if err != nil {
			return nil, nil, nil, err
		}
		limiters = make([]service.Limiter, len(d.pools))
		_ = sharded.Each(func(n int, on *client.Prefetcher) error { limiters[n] = on; return nil })
		return limiters, nil, sharded.Close, nil
	}
	citus, err := client.NewCitus(ctx, d.pools[0], func(ctx context.Context, host string, port int) (client.Pool, error) {
		pool, err := openPool(ctx, c, 0, func(config *pgxpool.Config) { sendTo(config.ConnConfig, host, uint16(port)) })
		if err == nil {
			d.nodes.Store(fmt.Sprint(host, ":", port), pool)
		}
		return pool, err
	}, options...)
	switch {
	case isRefusedBy(err, "42501"):
		d.log.Warn("all calls go through the coordinator of Citus: its owner can run: " + inspect.Grant(inspect.SomeRole, "ratelimit_nodes"))
	case err != nil && !isRefusedBy(err, "42883"):
		return nil, nil, nil, err
	case err == nil:
		for _, on := range citus.Shards() {
			limiters = append(limiters, on)
		}
		return limiters, citus.ShardOf, citus.Close, nil
	}
	prefetcher := client.NewPrefetcher(d.pools[0], options...) // without a Prefetch it is a Combiner
	return []service.Limiter{prefetcher}, nil, prefetcher.Close, nil
}

// sendTo has connections lead to another host, with TLS as before.
func sendTo(config *pgx.ConnConfig, host string, port uint16) {
	of := func(at *tls.Config) *tls.Config {
		if at != nil && at.ServerName != "" {
			at = at.Clone()
			at.ServerName = host
		}
		return at
	}
	config.Host, config.Port, config.TLSConfig = host, port, of(config.TLSConfig)
	for _, other := range config.Fallbacks {
		other.Host, other.Port, other.TLSConfig = host, port, of(other.TLSConfig)
	}
}

// of adds the number of the shard to an error.
func (d *databases) of(n int, err error) error {
	if err == nil || !d.shards {
		return err
	}
	return &client.ShardError{Shard: n, Of: len(d.down), Err: err}
}

// checks returns for each database the reason why it cannot acquire, or nil.
func (d *databases) checks(ctx context.Context) []error {
	errs := make([]error, len(d.pools))
	var checks sync.WaitGroup
	for n, pool := range d.pools {
		checks.Go(func() { errs[n] = d.of(n, check(ctx, pool)) })
	}
	checks.Wait()
	return errs
}

// check returns an error if no database can acquire. A single shard that cannot acquire is logged.
func (d *databases) check(ctx context.Context) error {
	errs := d.checks(ctx)
	for n, err := range errs {
		was := d.down[n].Swap(err != nil)
		switch {
		case !d.shards: // the monitor logs it
		case err != nil && !was:
			d.log.Warn("a shard is not healthy", "shard", n, "error", err)
		case err == nil && was:
			d.log.Info("a shard is healthy again", "shard", n)
		}
	}
	if !slices.Contains(errs, nil) {
		return errors.Join(errs...)
	}
	return nil
}

// isDown reports whether the last check of a database failed.
func (d *databases) isDown(n int) bool { return d.down[n].Load() }

// onEach calls do for each database that can acquire. It leaves out shards that do not answer, as long as one shard answers.
func (d *databases) onEach(ctx context.Context, do func(*pgxpool.Pool) error) error {
	checking := ctx
	if d.shards {
		var cancel func()
		checking, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	errs := d.checks(checking)
	if !slices.Contains(errs, nil) {
		return errors.Join(errs...)
	}
	for n, err := range errs {
		switch {
		case err == nil:
			err = d.of(n, do(d.pools[n]))
		case errors.Is(err, errNoAnswer): // another did
			d.log.Warn("a shard is left out", "shard", n, "error", err)
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *databases) connections(count func(*pgxpool.Stat) int32) (sum int64) {
	for _, pool := range d.pools {
		sum += int64(count(pool.Stat()))
	}
	for _, pool := range d.nodes.Range {
		sum += int64(count(pool.(*pgxpool.Pool).Stat()))
	}
	return sum
}

func openPool(ctx context.Context, c config.Config, n int, changes ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	url := c.URLs[n]
	p, err := pgxpool.ParseConfig(url)
	if err != nil {
		name := "DATABASE_URL"
		if c.AreShards {
			name = "SHARD_URLS"
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if !strings.Contains(url, "pool_max_conns") {
		p.MaxConns = connections
	}
	p.MaxConns = max(p.MaxConns, int32(c.SharedConnections())+1)
	if p.ConnConfig.ConnectTimeout == 0 {
		p.ConnConfig.ConnectTimeout = connectTimeout
	}
	set := p.ConnConfig.RuntimeParams
	if set["application_name"] == "" {
		set["application_name"] = "pgratelimit"
	}
	if c.LockTimeout > 0 && set["lock_timeout"] == "" {
		set["lock_timeout"] = strconv.FormatInt(c.LockTimeout.Milliseconds(), 10)
	}
	p.AfterConnect = inspect.CheckAlone
	if c.AreShards {
		p.AfterConnect = client.CheckShard(n, len(c.URLs))
	}
	for _, change := range changes {
		change(p)
	}
	return pgxpool.NewWithConfig(ctx, p)
}

// A standing has the rights of the server's role.
type standing struct {
	isInstalled bool // all of the functions are there
	may         bool // the role may call all of them
	isReadOnly  bool
}

// standingOf reads the rights to functions, each written with the types of its arguments.
func standingOf(ctx context.Context, db *pgxpool.Pool, functions ...string) (s standing, err error) {
	err = db.QueryRow(ctx, `
		select pg_catalog.bool_and(f.oid is not null),
		       pg_catalog.bool_and(coalesce(pg_catalog.has_function_privilege(f.oid, 'execute'), false)),
		       pg_catalog.current_setting('transaction_read_only') = 'on'
		  from (select pg_catalog.to_regprocedure(signature)::oid from pg_catalog.unnest($1::text[]) as signature) as f (oid)`,
		functions).Scan(&s.isInstalled, &s.may, &s.isReadOnly)
	return s, err
}

var errNoAnswer = errors.New("the database does not answer")

// check returns the reason why the database cannot acquire.
func check(ctx context.Context, db *pgxpool.Pool) error {
	s, err := standingOf(ctx, db, "ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[])")
	switch {
	case errors.Is(err, client.ErrWrongShard):
		return err
	case isRefusedBy(err, "08P01"):
		return fmt.Errorf("%w: %s: %w", errNoAnswer, service.PoolerRemedy, err)
	case err != nil:
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	case !s.isInstalled:
		return errors.New("pgratelimit is not installed in the database, or its schema is not on search_path, or its version is older than this program: run pgratelimit install")
	case !s.may:
		return errors.New("the role may not acquire: its owner can run: " +
			inspect.Grant(inspect.SomeRole, "ratelimit_acquire", "ratelimit_acquire_all", "ratelimit_acquire_packed") +
			" docs/server.md has the grants for other calls")
	case s.isReadOnly:
		return errors.New("the database is read-only, so connect to the primary")
	}
	return nil
}

func isRefusedBy(err error, sqlState string) bool {
	refusal, ok := errors.AsType[*pgconn.PgError](err)
	return ok && refusal.Code == sqlState
}

// definePolicy defines a policy unless it exists. Servers that start together take turns.
func definePolicy(ctx context.Context, db *pgxpool.Pool, policy client.Policy) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgratelimit: default policy'))"); err != nil {
			return err
		}
		limiter := client.New(db)
		_, err := limiter.Peek(ctx, policy.Name, "any", client.Cost(0)) // not in tx, which an error would end
		if errors.Is(err, client.ErrUnknownPolicy) {
			err = limiter.WithTx(tx).DefinePolicy(ctx, policy)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("DEFAULT_CAPACITY: the policy %s: %w", policy.Name, err)
	}
	return nil
}

// checkPrefetches checks the role, since no caller would get the error of a Prefetcher. A policy may be defined later.
func checkPrefetches(ctx context.Context, db *pgxpool.Pool, prefetches []client.Prefetch, log *slog.Logger) error {
	s, err := standingOf(ctx, db, "ratelimit_acquire_up_to(text, text, bigint, bigint, text)", "ratelimit_refund(text, text, bigint)")
	if err != nil {
		return fmt.Errorf("PREFETCH: %w", err)
	}
	if !s.may {
		return errors.New("PREFETCH: the role may not take tokens in advance: its owner can run: " +
			inspect.Grant(inspect.SomeRole, "ratelimit_acquire_up_to", "ratelimit_refund"))
	}
	for _, prefetch := range prefetches {
		_, err := client.New(db).Peek(ctx, prefetch.Policy, "any", client.Cost(0))
		switch {
		case errors.Is(err, client.ErrUnknownPolicy):
			log.Warn("PREFETCH names a policy that is not there yet", "policy", prefetch.Policy)
		case err != nil:
			return fmt.Errorf("PREFETCH: the policy %s: %w", prefetch.Policy, err)
		}
	}
	return nil
}
