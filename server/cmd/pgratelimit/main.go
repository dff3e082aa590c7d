// Command pgratelimit serves token bucket rate limits that live in PostgreSQL, installs them, and asks them.
//
//	pgratelimit serve
//	pgratelimit install
//	pgratelimit acquire api user:42 --cost 5
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/sql"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) (code int) {
	var p program
	root := p.command()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if code = exitCode(err); err != nil && code != exitNo && !errors.As(err, new(shownError)) {
		p.json = p.json || slices.Contains(args, "--json") // which is not read where a flag before it is wrong
		p.complain(stderr, err)
	}
	return code
}

type program struct {
	databaseURL string
	shardURLs   string // of databases that the program has created
	json        bool
}

func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgratelimit",
		Short: "Token bucket rate limits that live in PostgreSQL",
		Long: `Token bucket rate limits that live in PostgreSQL.

Exit codes:
   0  done; allowed; nothing to complain of
   1  an error
   2  no error, but a no: denied, doctor has findings, or apply --dry-run a difference
  64  the command line is wrong
  69  the database cannot be reached`,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(usageOf)
	root.PersistentFlags().StringVar(&p.databaseURL, "database-url", "", "the database (default $DATABASE_URL, or all of $SHARD_URLS)")
	root.PersistentFlags().BoolVar(&p.json, "json", false, "print JSON")
	root.AddCommand(
		p.serve(), p.health(),
		p.install(), p.uninstall(), p.apply(), p.export(),
		p.policies(), p.override(), p.reset(),
		p.status(), p.holders(), p.grants(), p.usage(), p.doctor(),
		p.acquire(), p.peek(),
		p.version(),
	)
	root.Args, root.SuggestionsMinimumDistance = checkCommand, 2
	for _, c := range root.Commands() {
		c.Args = checkArguments
	}
	return root
}

// checkArguments wants an argument for each name in Use. A name in brackets is optional.
func checkArguments(c *cobra.Command, args []string) error {
	switch names := strings.Fields(c.Use)[1:]; {
	case len(args) < len(names)-strings.Count(c.Use, "["):
		return usageOf(c, fmt.Errorf("the argument %s is missing", names[len(args)]))
	case len(args) > len(names) && c.Flags().Changed("prune"):
		return usageOf(c, fmt.Errorf("%q are too many arguments: what --prune drops follows =, such as --prune=overrides", args))
	case len(args) > len(names):
		return usageOf(c, fmt.Errorf("%q is an argument too many", args[len(names)]))
	}
	return nil
}

func checkCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	remedy := "see pgratelimit --help"
	if near := root.SuggestionsFor(args[0]); len(near) > 0 {
		remedy = "did you mean " + near[0] + "?"
	}
	return usageError{fmt.Errorf("no command is called %q: %s", args[0], remedy)}
}

// usageOf adds how a command is used to an error of its arguments or flags.
func usageOf(c *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	return usageError{fmt.Errorf("%w\nusage: %s", err, c.UseLine())}
}

func (p *program) version() *cobra.Command {
	c := &cobra.Command{Use: "version", Short: "Say which release this program is"}
	c.RunE = func(c *cobra.Command, _ []string) error {
		v := struct {
			Version string `json:"version"`
			Go      string `json:"go"`
		}{sql.Version, runtime.Version()}
		return p.print(c, v, fmt.Sprintf("pgratelimit %s, built with %s", v.Version, v.Go))
	}
	return c
}
