package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

// connectTimeout holds for URLs without connect_timeout.
const connectTimeout = 10 * time.Second

// A database is the one of a command, or one of its shards.
type database struct {
	*pgx.Conn
	shard, of int // of is 0 where there are no shards
}

// String names the shard; it is empty where there are none.
func (db database) String() string {
	if db.of == 0 {
		return ""
	}
	return fmt.Sprintf("shard %d of %d", db.shard, db.of)
}

// prefix names a shard before what is said of it.
func (db database) prefix() string {
	if db.of == 0 {
		return ""
	}
	return db.String() + ": "
}

// databases returns the databases of the command line, or else of the environment.
func (p *program) databases() (config.Databases, error) {
	url, shards := p.databaseURL, p.shardURLs
	if url == "" && shards == "" {
		url, shards = os.Getenv("DATABASE_URL"), os.Getenv("SHARD_URLS")
	}
	databases, err := config.NewDatabases(url, shards)
	if err != nil {
		return databases, usageError{fmt.Errorf("%w; --database-url would do, too", err)}
	}
	return databases, nil
}

// open connects to all databases, or to the shard of a key. It prints the warnings of the server.
func (p *program) open(ctx context.Context, warnings io.Writer, key *string) (dbs []database, err error) {
	databases, err := p.databases()
	if err != nil {
		return nil, err
	}
	for n, url := range databases.URLs {
		db := database{}
		if databases.AreShards {
			db.shard, db.of = n, len(databases.URLs)
			if key != nil && client.ShardOf(*key, db.of) != n {
				continue
			}
		}
		if db.Conn, err = connect(ctx, url, warnings); err != nil {
			closeAll(ctx, dbs)
			return nil, fmt.Errorf("%s%w", db.prefix(), err)
		}
		dbs = append(dbs, db)
	}
	return dbs, nil
}

func closeAll(ctx context.Context, dbs []database) {
	for _, db := range dbs {
		db.Close(context.WithoutCancel(ctx))
	}
}

// connect is open, and checks that each database is the shard that it is listed as, or no shard.
func (p *program) connect(ctx context.Context, warnings io.Writer, key *string) ([]database, error) {
	dbs, err := p.open(ctx, warnings, key)
	for _, db := range dbs {
		if err == nil && db.of > 0 {
			err = client.CheckShard(db.shard, db.of)(ctx, db.Conn)
		} else if err == nil {
			err = inspect.CheckAlone(ctx, db.Conn)
		}
	}
	if err != nil {
		closeAll(ctx, dbs)
		return nil, err
	}
	return dbs, nil
}

// An opener is open, or connect.
type opener func(ctx context.Context, warnings io.Writer, key *string) ([]database, error)

// onEach calls work for all databases, or for the shard of a key. It stops at the first error.
func (p *program) onEach(c *cobra.Command, open opener, key *string, work func(database) error) error {
	dbs, err := open(c.Context(), c.ErrOrStderr(), key)
	if err != nil {
		return err
	}
	defer closeAll(c.Context(), dbs)
	for _, db := range dbs {
		if err := work(db); err != nil {
			return fmt.Errorf("%s%w", db.prefix(), err)
		}
	}
	return nil
}

// onShardOf returns the RunE of a command about the key that is its second argument.
func (p *program) onShardOf(work func(c *cobra.Command, conn *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		return p.onEach(c, p.connect, &args[1], func(db database) error { return work(c, db.Conn, args) })
	}
}

// askAll returns the rows of all databases, or of the shard of a key.
func askAll[R any](p *program, c *cobra.Command, key *string, ask func(database) ([]R, error)) (all []R, err error) {
	all = []R{}
	err = p.onEach(c, p.connect, key, func(db database) error {
		rows, err := ask(db)
		all = append(all, rows...)
		return inspect.Described(err)
	})
	return all, err
}

func connect(ctx context.Context, url string, warnings io.Writer) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, usageError{fmt.Errorf("--database-url, DATABASE_URL or SHARD_URLS: %w", err)}
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" {
			fmt.Fprintln(warnings, strings.TrimSpace(fmt.Sprintf("%s: %s: %s %s", n.Severity, n.Message, n.Detail, n.Hint)))
		}
	}
	return pgx.ConnectConfig(ctx, config)
}

func (p *program) print(c *cobra.Command, value any, text string) error {
	if !p.json {
		_, err := fmt.Fprintln(c.OutOrStdout(), text)
		return err
	}
	return encode(c.OutOrStdout(), value, "")
}

// columns aligns what write writes, with a tab between two cells.
func columns(write func(table io.Writer)) string {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	write(table)
	table.Flush()
	return strings.TrimRight(text.String(), "\n")
}

func encode(w io.Writer, value any, indent string) error {
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	out.SetIndent("", indent)
	return out.Encode(value)
}

// The exit codes, which --help lists.
const (
	exitDone        = 0
	exitError       = 1
	exitNo          = 2
	exitUsage       = 64 // those of sysexits.h
	exitUnavailable = 69
)

// An answerNo ends a command with exit code 2. The command has printed its result.
type answerNo struct{}

func (answerNo) Error() string { return "the answer is no" }

type usageError struct{ error }

func exitCode(err error) int {
	var no answerNo
	var usage usageError
	var connect *pgconn.ConnectError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &no):
		return exitNo
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded):
		return exitUnavailable
	}
	return exitError
}

// complain prints an error, with --json as an object.
func (p *program) complain(w io.Writer, err error) {
	text := strings.Join(slices.Compact(strings.Split(err.Error(), "\n")), "\n") // pgx tries an address with TLS and without, and says twice that nobody is there
	if !p.json {
		fmt.Fprintln(w, text)
		return
	}
	complaint := struct {
		Error    string `json:"error"`
		SQLState string `json:"sqlstate,omitempty"`
	}{Error: text}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		complaint.SQLState = pgErr.Code
	}
	_ = encode(w, complaint, "") // there is nowhere to say that it failed
}
