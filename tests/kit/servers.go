package kit

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

const PrivateName = "ratelimit_test"

// NewPrivateDB returns a database on a server of its own.
func NewPrivateDB(t testing.TB, settings ...string) (*TestDB, *pgtest.Server) {
	server := pgtest.Private(t, settings...)
	return CreateDB(t, server, PrivateName), server
}

// Reopen connects to the database of newPrivateDB again, after a restart or on a standby.
func Reopen(t testing.TB, server *pgtest.Server) *TestDB { return OpenDB(t, server, PrivateName) }

// CreateDB creates a database on a server, prepares it with SQL in which %s is its name, and installs the package.
func CreateDB(t testing.TB, server *pgtest.Server, name string, prepare ...string) *TestDB {
	quoted := pgx.Identifier{name}.Sanitize()
	OnServer(t, server, "", "create database "+quoted+" template template0")
	for _, sql := range prepare {
		OnServer(t, server, name, strings.ReplaceAll(sql, "%s", quoted))
	}
	return InstalledDB(t, server, name)
}

// OnServer runs SQL in a database of a server, on a connection of its own.
func OnServer(t testing.TB, server *pgtest.Server, database, sql string) {
	conn := NoError(pgx.Connect(t.Context(), server.URL(database)))(t)
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, errors.Join(err, conn.Close(t.Context())))
}

func Restart(t testing.TB, server *pgtest.Server) {
	require.NoError(t, server.Stop(t.Context(), false))
	require.NoError(t, server.Start(t.Context()))
}

// BecomeStandby has a server go on as a standby that waits for a primary to follow.
func BecomeStandby(t testing.TB, server *pgtest.Server) {
	OnServer(t, server, "", `do $$ begin execute format('copy (select) to %L', current_setting('data_directory') || '/standby.signal'); end $$`)
	Restart(t, server)
}

// InstalledDB returns a database of a server, with the package installed.
func InstalledDB(t testing.TB, server *pgtest.Server, name string) *TestDB {
	db := OpenDB(t, server, name)
	require.NoError(t, migrations.Up(t.Context(), db.Connect(t)))
	return db
}

// OpenDB returns a database of a server as it is.
func OpenDB(t testing.TB, server *pgtest.Server, name string) *TestDB {
	return &TestDB{DB: &pgtest.DB{Pool: Pool(t, server.URL(name)), URL: server.URL(name), Name: name}, T: t}
}

func Pool(t testing.TB, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	config := NoError(pgxpool.ParseConfig(url))(t)
	for _, change := range change {
		change(config)
	}
	return OpenPool(t, config)
}

func OpenPool(t testing.TB, config *pgxpool.Config) *pgxpool.Pool {
	pool := NoError(pgxpool.NewWithConfig(context.Background(), config))(t)
	t.Cleanup(pool.Close)
	return pool
}

// A PatientPool has every call answered: of one that is given up after a second, the server may have charged what nobody gets.
type PatientPool struct{ *pgxpool.Pool }

func (p PatientPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return p.Pool.QueryRow(context.WithoutCancel(ctx), sql, args...)
}

// An Address is the URL of a database that moves: a container that is started again has another port.
type Address struct{ url atomic.Pointer[string] }

func (a *Address) MoveTo(url string) { a.url.Store(&url) }

func (a *Address) URL() string { return *a.url.Load() }

// Config is that of a pool whose new connections go where the database is then.
func (a *Address) Config(t testing.TB) *pgxpool.Config {
	config := NoError(pgxpool.ParseConfig(*a.url.Load()))(t)
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		now, err := pgx.ParseConfig(*a.url.Load())
		if err == nil {
			c.Host, c.Port, c.Fallbacks = now.Host, now.Port, now.Fallbacks
		}
		return err
	}
	return config
}

// Certificate is that of httptest for 127.0.0.1, in files, and a pool that trusts it.
func Certificate(t testing.TB) (certFile, keyFile string, pool *x509.CertPool) {
	own := httptest.NewTLSServer(nil)
	defer own.Close()
	key := NoError(x509.MarshalPKCS8PrivateKey(own.TLS.Certificates[0].PrivateKey))(t)
	write := func(name, kind string, der []byte) (path string) {
		return File(t, name, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
	}
	pool = x509.NewCertPool()
	pool.AddCert(own.Certificate())
	return write("cert", "CERTIFICATE", own.Certificate().Raw), write("key", "PRIVATE KEY", key), pool
}
