package main

import (
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func (p *program) install() *cobra.Command {
	return &cobra.Command{
		Use:   "install",
		Short: "Install into a database, or bring it up to date",
		Args:  exactly(0),
		RunE: p.onDatabase(func(c *cobra.Command, conn *pgx.Conn, _ []string) error {
			if err := migrations.Up(c.Context(), conn); err != nil {
				return err
			}
			var installed struct {
				SchemaVersion int32 `json:"schema_version"`
			}
			if err := conn.QueryRow(c.Context(), "select version from "+migrations.VersionTable).Scan(&installed.SchemaVersion); err != nil {
				return err
			}
			return p.print(c, installed, fmt.Sprintf("pgratelimit is installed: version %d of its schema.", installed.SchemaVersion))
		}),
	}
}

func (p *program) uninstall() *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Remove it from a database, with all policies and buckets",
		Args:  exactly(0),
		RunE: p.onDatabase(func(c *cobra.Command, conn *pgx.Conn, _ []string) error {
			if err := migrations.Down(c.Context(), conn); err != nil {
				return err
			}
			return p.print(c, struct{}{}, "pgratelimit is removed.")
		}),
	}
}
