package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// connectTimeout is for URLs that have no connect_timeout.
const connectTimeout = 10 * time.Second

// onDatabase makes a command of work on the database.
func (p *program) onDatabase(work func(c *cobra.Command, conn *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		conn, err := p.connect(c.Context(), c.ErrOrStderr())
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(c.Context()))
		return work(c, conn, args)
	}
}

// connect has warnings of the server printed.
func (p *program) connect(ctx context.Context, warnings io.Writer) (*pgx.Conn, error) {
	url := p.databaseURL
	if url == "" {
		url = os.Getenv("DATABASE_URL")
	}
	if url == "" {
		return nil, usageError{errors.New("which database? Set DATABASE_URL, or give --database-url")}
	}
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, usageError{err}
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
